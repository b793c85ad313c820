"""The ``quantization_config`` of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm.model_executor.layers.quantization.fp8 import Fp8Format
from vllm.model_executor.layers.quantization.int_quantized import Int8Format
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Format
from vllm.model_executor.layers.quantization.nvfp4 import Nvfp4PackedFormat
from vllm.model_executor.layers.quantization.pack_quantized import PackQuantizedFormat
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    setting,
    whole_number,
)
from vllm.ops.served_activations import ServedActivations

_EVERY_LINEAR = "Linear"
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


class _Group(NamedTuple):
    targets: Sequence[str]
    format: StorageFormat


def read_compressed_tensors(config: Mapping[str, Any]) -> FormatOf:
    """ValueError: a format that is not supported."""
    setting(config.get("sparsity_config") or {}, "format", "dense", ("dense", None))
    groups = [
        _Group(tuple(group.get("targets") or ()), _format_of_group(group, config.get("format")))
        for group in (config.get("config_groups") or {}).values()
        if group.get("weights") is not None
    ]

    def format_of(module: str, names: Collection[str]) -> StorageFormat | None:
        named = (group for group in groups if _matches(module, group.targets))
        others = (group for group in groups if _EVERY_LINEAR in group.targets)
        found = next(named, None) or next(others, None)
        return None if found is None else found.format

    return format_of


def _matches(module: str, patterns: Sequence[str]) -> bool:
    return any(
        re.match(pattern.removeprefix("re:"), module) is not None
        if pattern.startswith("re:")
        else module == pattern
        for pattern in patterns
    )


def _format_of_group(group: Mapping[str, Any], usual: str | None) -> StorageFormat:
    weights: Mapping[str, Any] = group["weights"]
    chosen = {"format": group.get("format") or usual or _usual_format(weights)}
    name = setting(chosen, "format", None, tuple(_FORMATS))
    setting(weights, "strategy", "tensor", _STRATEGIES)
    made = _FORMATS[name](weights)
    made.activations = _served_activations(group.get("input_activations"))
    return made


def _served_activations(stored: Mapping[str, Any] | None) -> ServedActivations | None:
    """None: activations stay as they are, or become what is not supported."""
    if stored is None or stored.get("num_bits") != 8 or not stored.get("symmetric", True):
        return None
    dtype = torch.float8_e4m3fn if stored.get("type") == "float" else torch.int8
    strategy, is_dynamic = stored.get("strategy"), stored.get("dynamic") in (True, "local")
    if strategy == "tensor" and not is_dynamic:
        return ServedActivations(dtype, has_scale=True)
    if strategy == "token" and is_dynamic:
        return ServedActivations(dtype)
    if strategy == "group" and is_dynamic and stored.get("group_size"):
        return ServedActivations(dtype, whole_number(stored, "group_size"))
    return None


def _usual_format(weights: Mapping[str, Any]) -> str:
    if weights.get("type") == "float":
        return "float-quantized"
    return "int-quantized" if weights.get("num_bits") == 8 else "pack-quantized"


def _group_size(weights: Mapping[str, Any]) -> int:
    return -1 if weights.get("group_size") is None else whole_number(weights, "group_size")


def _float_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    setting(weights, "num_bits", 8, (8,))
    if weights.get("strategy") == "block":
        block = weights.get("block_structure")
        if isinstance(block, str):
            block = [int(size) for size in block.split("x")]
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise ValueError(
                f"quantization_config: block_structure={block!r} has to be two numbers"
            )
        return Fp8Format((int(block[0]), int(block[1])))
    size = _group_size(weights)
    return Fp8Format(group_size=None if size == -1 else size)


def _int_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    setting(weights, "num_bits", 8, (8,))
    return Int8Format(_group_size(weights))


def _naive_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    is_float = weights.get("type") == "float"
    return _float_quantized(weights) if is_float else _int_quantized(weights)


def _pack_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    return PackQuantizedFormat(setting(weights, "num_bits", 4, (4, 8)), _group_size(weights))


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], StorageFormat]] = {
    "float-quantized": _float_quantized,
    "int-quantized": _int_quantized,
    "naive-quantized": _naive_quantized,
    "pack-quantized": _pack_quantized,
    "mxfp4-pack-quantized": lambda weights: Mxfp4Format(),
    "nvfp4-pack-quantized": lambda weights: Nvfp4PackedFormat(),
}
