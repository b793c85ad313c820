"""Parts of models that are not layers: names, lists of layers, loading of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ShardId
from vllm.model_executor.model_loader.weight_utils import (
    LOADABLE_DTYPES,
    WeightShapeError,
    weight_loader_of,
)
from vllm.sequence import IntermediateTensors

logger = init_logger(__name__)

StackedParams = Mapping[str, Mapping[str, ShardId]]
"""Module that holds several projections -> name in the checkpoint -> its part."""

_MOST_NAMES_SHOWN = 8
# Old checkpoints hold tables that every engine computes anew.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def maybe_prefix(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` when there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


def make_layers(
    num_layers: int, make_layer: Callable[[int, str], nn.Module], prefix: str
) -> nn.ModuleList:
    """``make_layer(index, its prefix)`` for every index."""
    return nn.ModuleList(make_layer(i, f"{prefix}.{i}") for i in range(num_layers))


def make_empty_intermediate_tensors_factory(
    keys: Sequence[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """What makes zeros [batch_size, hidden_size] under each of ``keys``."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        shape = (batch_size, hidden_size)
        return IntermediateTensors(
            {key: torch.zeros(shape, dtype=dtype, device=device) for key in keys}
        )

    return make


class _Target(NamedTuple):
    param_name: str
    param: nn.Parameter
    shard_id: ShardId


class AutoWeightsLoader:
    """Loads a checkpoint into a module, strictly.

    Every parameter must be found, every tensor used, every shape right; a ValueError
    names, as the checkpoint spells them, those that are not.

    stacked: how modules that hold several projections are named in the checkpoint.
    checkpoint_prefixes: prefix in the module -> prefix in the checkpoint.
    skip_prefixes: tensors of the checkpoint that the module has no use for; their numbers
    are logged.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stacked: StackedParams | None = None,
        checkpoint_prefixes: Mapping[str, str] | None = None,
        skip_prefixes: Sequence[str] = (),
    ) -> None:
        self.skip_prefixes = tuple(skip_prefixes)
        self.targets: dict[str, _Target] = {}
        for name, param in module.named_parameters():
            for file_name, shard_id in _stacked_names(name, stacked or {}):
                renamed = _replace_prefix(file_name, checkpoint_prefixes or {})
                self.targets[renamed] = _Target(name, param, shard_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``(name, tensor)`` pairs; returns the names of the parameters."""
        loaded: set[str] = set()
        unexpected: list[str] = []
        skipped: Counter[str] = Counter()
        for name, tensor in weights:
            prefix = next((p for p in self.skip_prefixes if name.startswith(p)), None)
            if prefix is not None:
                skipped[prefix] += 1
            elif name in self.targets:
                if name in loaded:
                    raise ValueError(f"weight {name!r} is in the checkpoint twice")
                self._load(name, tensor)
                loaded.add(name)
            elif not name.endswith(_DERIVED_SUFFIXES):
                unexpected.append(name)
        self._check_complete([name for name in self.targets if name not in loaded], unexpected)
        for prefix, count in skipped.items():
            logger.info(
                "Skipped %d weights named %s*: this engine does not use them.", count, prefix
            )
        return {target.param_name for target in self.targets.values()}

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in LOADABLE_DTYPES:
            raise ValueError(
                f"weight {name!r} is {tensor.dtype} in the checkpoint; only float32, bfloat16 "
                f"and float16 checkpoints can be loaded"
            )
        target = self.targets[name]
        loader = weight_loader_of(target.param)
        try:
            if target.shard_id is None:
                loader(target.param, tensor)
            else:
                loader(target.param, tensor, target.shard_id)
        except WeightShapeError as error:
            raise ValueError(
                f"weight {name!r} {error}: the checkpoint and its config.json disagree"
            ) from error

    @staticmethod
    def _check_complete(missing: list[str], unexpected: list[str]) -> None:
        complaints = []
        if missing:
            complaints.append(f"is missing {len(missing)} weight(s): {_listing(missing)}")
        if unexpected:
            complaints.append(
                f"has {len(unexpected)} weight(s) that the model has no place for: "
                f"{_listing(unexpected)}"
            )
        if complaints:
            raise ValueError("the checkpoint " + "; and ".join(complaints))


def _stacked_names(name: str, stacked: StackedParams) -> Iterable[tuple[str, ShardId]]:
    """Checkpoint names of the parts of the parameter ``name``."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last not in stacked:
        return [(name, None)]
    return [(f"{parent}.{part}.{leaf}", shard_id) for part, shard_id in stacked[last].items()]


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    for own, theirs in prefixes.items():
        if name.startswith(own):
            return theirs + name[len(own) :]
    return name


def _listing(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
