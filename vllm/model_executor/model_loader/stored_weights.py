"""Joins the tensors of each module of a quantised checkpoint into a weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.quantization import read_quantization
from vllm.model_executor.layers.quantization.storage_format import (
    UNUSED,
    FormatOf,
    StorageFormat,
)
from vllm.model_executor.model_loader.checkpoint import Wanted, read_all, tensor_names
from vllm.model_executor.model_loader.weight_utils import dequantised
from vllm.model_executor.utils import LOADABLE_DTYPES
from vllm.ops.packed_linear import PackedExperts, PackedWeight

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

Weight = torch.Tensor | PackedWeight | PackedExperts
_SCALES = ("weight_scale_inv", "weight_scale")
_OF_ALL_EXPERTS = ("_proj_activation_scale", "_proj_input_scale")
"""Ends of the names that UNUSED tensors have beside a tensor of all experts."""


def stored_weights(
    model_config: ModelConfig,
    files: list[Path],
    tensors: Iterable[tuple[str, torch.Tensor]],
    wanted: Wanted = read_all,
) -> Iterable[tuple[str, Weight]]:
    """Yield ``tensors``, the wanted ones of the files; those of a quantised checkpoint joined into
    weights."""
    if model_config.quantization_config is None:
        return tensors
    return join_given_weights(model_config, tensor_names(files, wanted), tensors)


def check_stored_alike(
    config: Mapping[str, Any], other: Mapping[str, Any], names: Collection[str]
) -> None:
    """Raise ValueError if two quantization_configs give tensors of these names another meaning."""
    format_of, other_format_of = read_quantization(config), read_quantization(other)
    for name in names:
        stored, others = (_part_of_module(name, names, one) for one in (format_of, other_format_of))
        if (stored and _settings_of(stored[0])) != (others and _settings_of(others[0])):
            raise ValueError(
                f"weight {name!r} means something else by the quantization_config of the weights "
                "than by that with which the engine started; start another engine"
            )


def _settings_of(stored: object) -> object:
    if not isinstance(stored, StorageFormat):
        return stored
    return type(stored), {name: _settings_of(value) for name, value in vars(stored).items()}


def join_given_weights(
    model_config: ModelConfig,
    names: Collection[str],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, Weight]]:
    """Yield ``tensors`` of a quantised checkpoint joined into weights.

    names: those of the checkpoint. ValueError: a tensor of a module is there, and others are not.
    """
    config = model_config.quantization_config
    assert config is not None
    as_served = model_config.activation_quantization == "as_served"
    format_of = read_quantization(config)
    tensors = _of_the_method(tensors, names, format_of, str(config.get("quant_method")))
    return join_stored_weights(tensors, names, format_of, as_served=as_served)


def _of_the_method(
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Collection[str],
    format_of: FormatOf,
    method: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors. ValueError: one is quantised by another method than the config's."""
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        scale = next((leaf for leaf in _SCALES if f"{module}.{leaf}" in names), None)
        is_float = tensor.dtype in LOADABLE_DTYPES
        if scale and not is_float and _part_of_module(name, names, format_of) is None:
            raise ValueError(
                f"weight {name!r} is {tensor.dtype} with {scale} in the checkpoint, of which "
                f"quant_method={method!r} in its quantization_config says nothing; store the "
                "module as floats, or by that method"
            )
        yield name, tensor


def join_stored_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    names: Collection[str],
    format_of: FormatOf,
    *,
    as_served: bool = False,
) -> Iterator[tuple[str, Weight]]:
    """Yield ``(name, tensor)`` for tensors that are not quantised, else ``(name, weight)``.

    names: all tensors of the checkpoint. A module that has only a float weight counts as not
    quantised, listed or not. as_served: weights tell how their inputs are rounded. ValueError names
    a tensor that is missing or wrong.
    """
    waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    num_unused = 0
    for name, tensor in weights:
        found = _part_of_module(name, names, format_of)
        if found is None:
            if name.rpartition(".")[2] in UNUSED or name.endswith(_OF_ALL_EXPERTS):
                num_unused += 1
            else:
                yield name, tensor
            continue
        stored, module, leaf = found
        parts = waiting[module]
        parts[leaf] = tensor
        expected = [each for each in stored.names(module) if each in names]
        if len(parts) < len(expected):
            continue
        del waiting[module]
        if _is_float(parts):
            yield stored.weight_name(module), parts["weight"]
        elif as_served:
            yield stored.weight_name(module), stored.read_as_served(module, parts)
        else:
            yield stored.weight_name(module), stored.read(module, parts)
    for module, parts in waiting.items():
        owner = format_of(module, names)
        assert owner is not None
        if not _is_float(parts):
            expected = [name for name in owner.names(module) if name in names]
            given = [owner.tensor_name(module, leaf) for leaf in parts]
            missing = next(name for name in expected if name not in given)
            raise ValueError(
                f"weight {missing!r} is missing beside {given[0]!r}: the tensors of a module that "
                f"is stored as {owner.name} belong together"
            )
        yield owner.weight_name(module), parts["weight"]
    if num_unused:
        logger.info(
            "Skipped %d scales of activations and caches, which are not quantised.", num_unused
        )


def _is_float(parts: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a module's tensors are a weight that is not quantised."""
    weight = parts.get("weight")
    is_float = weight is not None and weight.dtype in LOADABLE_DTYPES
    return is_float and parts.keys() <= {"weight", *UNUSED}


def dequantise_all(
    weights: Iterable[tuple[str, Weight]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with quantised ones dequantised to ``dtype``."""
    for name, weight in weights:
        if isinstance(weight, torch.Tensor):
            yield name, weight
        else:
            yield name, dequantised(name, weight, dtype)


def _part_of_module(
    name: str, names: Collection[str], format_of: FormatOf
) -> tuple[StorageFormat, str, str] | None:
    stored = format_of(name.rpartition(".")[0], names)
    split = None if stored is None else stored.split(name)
    return None if stored is None or split is None else (stored, *split)
