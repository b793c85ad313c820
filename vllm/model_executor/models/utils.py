"""Helpers of models: names, lists of layers, loading of weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from vllm.config.model_facts import config_value
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ShardId
from vllm.model_executor.layers.weight import find_weight
from vllm.model_executor.model_loader.weight_utils import (
    check_dtype,
    dequantised,
    each_once,
    log_skipped,
    weight_loader_of,
)
from vllm.model_executor.utils import (
    ElsewhereParameter,
    UnsupportedConfigError,
    WeightFormatError,
    WeightShapeError,
)
from vllm.ops.packed_linear import CutGroupError, PackedExperts, PackedWeight
from vllm.sequence import IntermediateTensors

logger = init_logger(__name__)

StackedParams = Mapping[str, Mapping[str, ShardId]]
"""Module that holds several projections -> name in the checkpoint -> its part."""
STACKED_QKV: StackedParams = {"qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}}
STACKED_GATE_UP: StackedParams = {"gate_up_proj": {"gate_proj": 0, "up_proj": 1}}

LLAVA_PREFIXES: Mapping[str, str] = {
    "model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
"""``checkpoint_prefixes`` of a whole language model beside a vision tower."""

CLASSIFIERS = ("score.", "classifier.")
"""Prefixes of the heads that classify sequences or tokens."""
BEFORE_CLASSIFIERS = ("head.",)
"""Prefixes of layers that some modules of transformers have before the classifier."""
VALUE_HEAD = "v_head."
"""Prefix of the value head that TRL stores beside an LM head."""
_MOST_NAMES_SHOWN = 8
DERIVED_SUFFIXES = (
    *(f".rotary_emb.{table}" for table in ("inv_freq", "cos_cached", "sin_cached")),
    *(f".self_attn.{table}" for table in ("slope_rate", "query_decay", "key_decay")),
    ".self_attn.diagonal_decay",
    *(f".{module}.{mask}" for module in ("attn", "attention") for mask in ("bias", "masked_bias")),
    ".attn.causal_mask",
)
"""Suffixes of tables and masks in old checkpoints, which every engine computes anew."""


def maybe_prefix(prefix: str, name: str) -> str:
    """Join ``prefix.name``; without a prefix return ``name``."""
    return f"{prefix}.{name}" if prefix else name


def extract_layer_index(layer_name: str) -> int:
    """The 7 in ``model.layers.7.self_attn.attn``. ValueError: there is no number, or several."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"{layer_name!r} has {len(numbers)} numbers in it, a layer has one")
    return numbers[0]


def number_at_end(name: str) -> int:
    """The 7 in ``model.layers.7``; -1: there is no number."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else -1


def make_layers(
    num_layers: int, make_layer: Callable[[int, str], nn.Module], prefix: str
) -> nn.ModuleList:
    """Call ``make_layer(index, prefix)`` for every index."""
    return nn.ModuleList(make_layer(i, f"{prefix}.{i}") for i in range(num_layers))


def make_empty_intermediate_tensors_factory(
    keys: Sequence[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """Return a function that makes zeros [batch_size, hidden_size] under each of ``keys``."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        shape = (batch_size, hidden_size)
        return IntermediateTensors(
            {key: torch.zeros(shape, dtype=dtype, device=device) for key in keys}
        )

    return make


def require_option(config: Any, **supported: Any) -> None:
    """UnsupportedConfigError: an option has a value that the class does not support."""
    for name, value in supported.items():
        found = config_value(config, (name,))
        if found is not None and (found or None) != (value or None):
            raise UnsupportedConfigError(
                f"config.json: {name}={found!r} is not supported; supported: {value!r}", name
            )


def layer_kind(
    config: Any, index: int, supported: Collection[str], option: str = "layer_types"
) -> str:
    """The kind of the layer at ``index``, by the config's list ``option``.

    ValueError: it is not in ``supported``, or the list is too short.
    """
    kinds = config_value(config, (option,)) or ()
    kind = kinds[index] if index < len(kinds) else None
    if kind not in supported:
        raise ValueError(
            f"config.json: {option}[{index}]={kind!r} is not supported; supported: "
            + ", ".join(map(repr, supported))
        )
    return str(kind)


class _Target(NamedTuple):
    param_name: str
    param: nn.Parameter
    shard_id: ShardId
    layout: int
    """Index of the layout of the parameter to which this tensor belongs."""


class WeightPlace(NamedTuple):
    """The place of a checkpoint's tensor in a model."""

    param_name: str
    param: nn.Parameter
    shard_id: ShardId
    convert: Callable[[torch.Tensor], torch.Tensor]
    """From the checkpoint's layout to the layers'."""


Weight = torch.Tensor | PackedWeight | PackedExperts

Convert = Callable[[str, Any], Any]
"""``convert(name in the checkpoint, tensor)`` returns the tensor as the layers have it."""


@runtime_checkable
class HasLayouts(Protocol):
    """A module whose parameters have several layouts in checkpoints."""

    def checkpoint_layouts(self, leaf: str) -> Sequence[Mapping[str, ShardId]]:
        """For one of its parameters, list each layout: names of tensors and their shards."""
        ...


class CheckpointNames:
    """Names of parameters as a checkpoint spells them.

    stacked: names of modules that hold several projections. renamed: parts of names, own -> the
    checkpoint's; whole words between dots. prefixes: beginnings of names, applied afterwards.
    """

    def __init__(
        self,
        stacked: StackedParams,
        renamed: Mapping[str, str],
        prefixes: Mapping[str, str],
    ) -> None:
        self._stacked, self._renamed, self._prefixes = stacked, renamed, prefixes
        parts = "|".join(re.escape(part) for part in sorted(renamed, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![^.])(?:{parts})(?![^.])") if parts else None

    def spell(self, name: str) -> str:
        """Return the checkpoint's spelling of a name."""
        if self._pattern is not None:
            name = self._pattern.sub(lambda match: self._renamed[match[0]], name)
        for own, theirs in self._prefixes.items():
            if name.startswith(own):
                return theirs + name[len(own) :]
        return name

    def bases(self) -> list[str]:
        """List the beginnings of names that a checkpoint of the model below the head leaves out."""
        parts = self.spell("model.layers").split(".")
        return [".".join(parts[:end]) + "." for end in range(1, len(parts))]

    def layouts(self, root: nn.Module, name: str) -> list[dict[str, ShardId]]:
        """List the layouts of a parameter in the file: its tensors and their shards."""
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        owner = root.get_submodule(module)
        own = owner.checkpoint_layouts(leaf) if isinstance(owner, HasLayouts) else ()
        ways = [
            {self.spell(f"{module}.{part}" if module else part): s for part, s in way.items()}
            for way in own or [{leaf: None}]
        ]
        if last not in self._stacked:
            return ways
        parts = self._stacked[last].items()
        stacked = {self.spell(f"{parent}.{part}.{leaf}"): shard for part, shard in parts}
        return [stacked, *(ways if own else ())]


class AutoWeightsLoader:
    """Loads a checkpoint into a module, strictly.

    Every parameter has to be found, every tensor used, every shape right. Otherwise a ValueError
    names the exceptions as the checkpoint spells them. Once the module's weights are finished,
    parameters may be missing: they keep their values.

    stacked, renamed, checkpoint_prefixes: see :class:`CheckpointNames`. convert: applied to every
    tensor. floats_are_transposed: convert undoes this, so codes with outputs first do without it.
    skip_prefixes: tensors of the checkpoint to skip unless the module has a place for them (a tied
    head has one for its bias); their numbers are logged. head_prefix: names of the LM head, which
    may be missing altogether where names lack the base of the model's, or lacks_head is True.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stacked: StackedParams | None = None,
        renamed: Mapping[str, str] | None = None,
        checkpoint_prefixes: Mapping[str, str] | None = None,
        convert: Convert | None = None,
        floats_are_transposed: bool = False,
        skip_prefixes: Sequence[str] = (),
        head_prefix: str = "",
        lacks_head: bool = False,
    ) -> None:
        self.module = module
        self.num_packed = self.num_dequantised = 0
        names = CheckpointNames(stacked or {}, renamed or {}, checkpoint_prefixes or {})
        self.skip_prefixes = tuple(skip_prefixes)
        self.bases = names.bases()
        only_prefixes = CheckpointNames({}, {}, checkpoint_prefixes or {})
        self.spellings = (only_prefixes.spell, names.spell)
        self.head_prefix, self.lacks_head = head_prefix, lacks_head
        self.convert, self.floats_are_transposed = convert, floats_are_transposed
        self.targets: dict[str, _Target] = {}
        held = (find_weight(param) for param in module.parameters())
        self.is_update = any(weight is not None and weight.is_finished for weight in held)
        for name, param in module.named_parameters():
            for layout, tensors in enumerate(names.layouts(module, name)):
                for file_name, shard_id in tensors.items():
                    self.targets[file_name] = _Target(name, param, shard_id, layout)

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> set[str]:
        """Load ``(name, tensor)`` pairs and return the names of the parameters."""
        loaded: set[str] = set()
        unexpected: list[str] = []
        zero_biases: list[str] = []
        skipped: Counter[str] = Counter()
        for name, written, tensor in each_once(weights, self._own_name):
            prefix = next((p for p in self.skip_prefixes if written.startswith(p)), None)
            if prefix is not None and name not in self.targets:
                skipped[f"named {prefix}*"] += 1
            elif name in self.targets:
                self._load(name, tensor)
                loaded.add(name)
            elif is_zero_bias(written, tensor):
                zero_biases.append(written)
            elif not written.endswith(DERIVED_SUFFIXES):
                unexpected.append(written)
        if not (self.num_packed or self.num_dequantised):  # old packers of GPTQ wrote them
            unexpected += zero_biases
        missing, doubled = self._compare_layouts(loaded)
        if self.is_update:
            self.lacks_head = False
            self._check_complete([], unexpected + doubled)
            return {self.targets[name].param_name for name in loaded}
        head = {name for name in self.targets if name.startswith(self.head_prefix or "/")}
        self.lacks_head &= bool(head) and head.isdisjoint(loaded)
        missing = [name for name in missing if not (self.lacks_head and name in head)]
        missing = [
            name for name in missing if not isinstance(self.targets[name].param, ElsewhereParameter)
        ]
        self._check_complete(missing, unexpected + doubled)
        if self.num_packed or self.num_dequantised:
            logger.info(
                "Quantised weights: %d stay as they are stored, %d were dequantised.",
                self.num_packed,
                self.num_dequantised,
            )
        log_skipped(skipped)
        return {target.param_name for target in self.targets.values()}

    def find(self, written: str) -> WeightPlace | None:
        """Return the place of a tensor; None: the model has none."""
        target = self.targets.get(name := self._own_name(written))
        if target is None:
            return None
        convert = self.convert or (lambda _, tensor: tensor)
        place = (target.param_name, target.param, target.shard_id)
        return WeightPlace(*place, partial(convert, name))

    def _own_name(self, written: str) -> str:
        """Return the parameter's name. transformers adds the base to names and strips it, too, and
        writes its own names for a bare model."""
        if written in self.targets:
            return written
        spelled = (
            spell(name) for spell in self.spellings for name in (f"model.{written}", written)
        )
        names = (*other_bases(written, self.bases), *spelled)
        found = next((name for name in names if name in self.targets), written)
        self.lacks_head |= len(found) > len(written)  # saved from the model below the head
        return found

    def _compare_layouts(self, loaded: set[str]) -> tuple[list[str], list[str]]:
        """Names that are missing, and names of a second layout of a parameter that has one."""
        chosen: dict[str, int] = {}
        for name, target in self.targets.items():
            if name in loaded:
                chosen.setdefault(target.param_name, target.layout)
        missing, doubled = [], []
        for name, target in self.targets.items():
            is_chosen = target.layout == chosen.get(target.param_name, 0)
            if is_chosen and name not in loaded:
                missing.append(name)
            elif not is_chosen and name in loaded:
                doubled.append(name)
        return missing, doubled

    def _load(self, name: str, tensor: Weight) -> None:
        target, convert = self.targets[name], self.convert
        if isinstance(target.param, ElsewhereParameter):
            return
        if not isinstance(tensor, torch.Tensor):
            is_known = isinstance(tensor, PackedExperts) and tensor.inputs_first
            is_right = isinstance(tensor, PackedWeight) and tensor.outputs_first
            convert = None if self.floats_are_transposed and is_right else convert
            can_convert = convert is None or is_known
            weight = find_weight(target.param)
            is_kept = can_convert and weight is not None and weight.keeps(tensor)
            self.num_packed += is_kept
            self.num_dequantised += not is_kept
            tensor = tensor if is_kept else dequantised(name, tensor, target.param.dtype)
        else:
            check_dtype(name, tensor)
        loader = weight_loader_of(target.param)
        try:
            if convert is not None:
                assert not isinstance(tensor, PackedWeight)
                tensor = convert(name, tensor)
            if target.shard_id is None:
                loader(target.param, tensor)
            else:
                loader(target.param, tensor, target.shard_id)
        except WeightShapeError as error:
            raise ValueError(
                f"weight {name!r} {error}: the checkpoint and its config.json disagree"
            ) from error
        except (CutGroupError, WeightFormatError) as error:
            raise ValueError(f"weight {name!r} {error}") from error

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


def other_bases(name: str, bases: Sequence[str]) -> Iterator[str]:
    """Yield the name with one of ``bases`` before it, and without one that it begins with."""
    for base in bases:
        yield base + name
        if name.startswith(base):
            yield name.removeprefix(base)


def is_zero_bias(name: str, tensor: Weight) -> bool:
    """Return whether the tensor is a bias of zeros."""
    if not name.endswith(".bias") or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return False
    return not tensor.any()


def other_heads(has_other_head: bool) -> tuple[str, ...]:
    """Return the prefixes of heads that the model does not run (``v1/engine/pooling_heads.py``)."""
    return (VALUE_HEAD, *(CLASSIFIERS if has_other_head else ()))


def _listing(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
