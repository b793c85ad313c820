"""The ``quantization_config`` of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm.model_executor.layers.quantization.compressed_integers import (
    Int8Format,
    PackQuantizedFormat,
)
from vllm.model_executor.layers.quantization.fp4 import Mxfp4Format, Nvfp4PackedFormat
from vllm.model_executor.layers.quantization.fp8 import Fp8Format, Mxfp8Format
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    block_of,
    expression,
    names_of,
    section,
    setting,
    whole_number,
)
from vllm.ops.served_activations import ServedActivations

_EVERY_LINEAR = "Linear"
_MIXED = "mixed-precision"
_OFFLINE = ("weight_input", "weight_output")
"""Locations of transforms that are already part of the stored weights."""
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


class _Group(NamedTuple):
    names: Collection[str]
    patterns: Sequence[re.Pattern[str]]
    format: StorageFormat

    def targets(self, module: str) -> bool:
        """Return whether the group names the module itself."""
        return module in self.names or any(each.match(module) for each in self.patterns)


def read_compressed_tensors(config: Mapping[str, Any]) -> FormatOf:
    """Read the config. ValueError: a format is not supported."""
    setting(section(config, "sparsity_config"), "format", "dense", ("dense",))
    _refuse_transforms(section(config, "transform_config"))
    stored = section(config, "config_groups")
    given = [section(stored, name) for name in stored]
    usual = None if config.get("format") == _MIXED else config.get("format")
    groups = [_read_group(group, usual) for group in given if group.get("weights")]

    def format_of(module: str, names: Collection[str]) -> StorageFormat | None:
        named = (group for group in groups if group.targets(module))
        others = (group for group in groups if _EVERY_LINEAR in group.names)
        found = next(named, None) or next(others, None)
        if found is None and f"{module}.weight_scale" in names:
            targets = sorted(name for group in given for name in names_of(group, "targets"))
            raise ValueError(
                f"weight '{module}.weight_scale' is in the checkpoint, but its quantization_config "
                f"has no group of config_groups that names the module; targets: "
                f"{', '.join(map(repr, targets))}; supported: 'Linear', names, 're:' and a pattern"
            )
        return None if found is None else found.format

    return format_of


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    """ValueError: transforms are applied to activations while the model runs."""
    schemes = section(config, "config_groups")
    for name in schemes:
        places = section(schemes, name).get("apply") or []
        if not isinstance(places, list) or not all(isinstance(each, Mapping) for each in places):
            raise ValueError(
                f"quantization_config: transform_config: {name!r}: apply={places!r} has to be a "
                "list of settings"
            )
        for place in places:
            if place.get("location") not in _OFFLINE:
                raise ValueError(
                    f"quantization_config: transform_config: {name!r} is applied at location="
                    f"{place.get('location')!r} while the model runs, which is not supported; "
                    f"supported: {', '.join(map(repr, _OFFLINE))}"
                )


def _read_group(group: Mapping[str, Any], usual: str | None) -> _Group:
    targets = names_of(group, "targets")
    patterns = [
        expression(target.removeprefix("re:"), "targets")
        for target in targets
        if target.startswith("re:")
    ]
    return _Group(targets, patterns, _format_of_group(group, usual))


def _format_of_group(group: Mapping[str, Any], usual: str | None) -> StorageFormat:
    weights = section(group, "weights")
    chosen = {"format": group.get("format") or usual or _usual_format(weights)}
    name = setting(chosen, "format", None, tuple(_FORMATS))
    setting(weights, "strategy", "tensor", _STRATEGIES)
    types, make = _FORMATS[name]
    setting(weights, "type", None, (*types, None))
    made = make(weights)
    told = {
        "weight_zero_point": setting(weights, "symmetric", True, (True, False)) is False,
        "weight_g_idx": weights.get("actorder") in ("group", "dynamic", True),
    }
    made.announced = tuple(leaf for leaf in made.optional if told.get(leaf))
    made.takes_one_scale = weights.get("strategy") in (None, "tensor")
    made.activations = _served_activations(section(group, "input_activations"))
    return made


def _served_activations(stored: Mapping[str, Any]) -> ServedActivations | None:
    """The rounding of activations; None: there is none, or it is not supported."""
    if stored.get("num_bits") != 8 or not stored.get("symmetric", True):
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
    if weights.get("type") == "float" and weights.get("num_bits") == 4:
        return "mxfp4-pack-quantized" if weights.get("group_size") == 32 else "nvfp4-pack-quantized"
    if weights.get("type") == "float":
        return "float-quantized"
    return "int-quantized" if weights.get("num_bits") == 8 else "pack-quantized"


def _group_size(weights: Mapping[str, Any]) -> int:
    return -1 if weights.get("group_size") is None else whole_number(weights, "group_size")


def _float_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    setting(weights, "num_bits", 8, (8,))
    if weights.get("strategy") == "block":
        return Fp8Format(block_of(weights, "block_structure"))
    size = _group_size(weights)
    return Fp8Format(group_size=None if size == -1 else size)


def _int_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    setting(weights, "num_bits", 8, range(2, 9))  # one per int8
    return Int8Format(_group_size(weights))


def _naive_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    is_float = weights.get("type") == "float"
    return _float_quantized(weights) if is_float else _int_quantized(weights)


def _pack_quantized(weights: Mapping[str, Any]) -> StorageFormat:
    return PackQuantizedFormat(setting(weights, "num_bits", 4, (2, 4, 8)), _group_size(weights))


_FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], StorageFormat]]] = {
    "float-quantized": (("float",), _float_quantized),
    "int-quantized": (("int",), _int_quantized),
    "naive-quantized": (("int", "float"), _naive_quantized),
    "pack-quantized": (("int",), _pack_quantized),
    "mxfp4-pack-quantized": (("float",), lambda weights: Mxfp4Format()),
    "mxfp8-quantized": (("float",), lambda weights: Mxfp8Format()),
    "nvfp4-pack-quantized": (("float",), lambda weights: Nvfp4PackedFormat()),
}
"""Types of weights, and the function that makes their format from the config."""
