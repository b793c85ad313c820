"""The ``quantization_config`` of AMD Quark: FP8, INT8 and MXFP4 weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import translate
from typing import Any

import torch

from vllm.model_executor.layers.quantization.compressed_integers import Int8Format
from vllm.model_executor.layers.quantization.fp4 import Mxfp4ModuleFormat
from vllm.model_executor.layers.quantization.fp8 import Fp8Format
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    section,
    setting,
)
from vllm.ops.served_activations import ServedActivations

_FP8, _INT8, _FP4 = ("fp8_e4m3", "fp8"), ("int8",), ("fp4", "fp4_e2m1")
_ONLINE = ("online_r1_rotation", "r3", "r4", "online_rotations")


def read_quark(config: Mapping[str, Any]) -> FormatOf:
    """Read the config. ValueError: a kind of weight or a rotation is not supported."""
    setting(section(config, "export"), "weight_format", "real_quantized", ("real_quantized",))
    _refuse_rotations(config)
    usual = _format_of(section(config, "global_quant_config"))
    layers = section(config, "layer_quant_config")
    others = [
        (re.compile(translate(pattern)), _format_of(section(layers, pattern))) for pattern in layers
    ]

    def format_of(module: str, names: Collection[str]) -> StorageFormat | None:
        return next((made for pattern, made in others if pattern.match(module)), usual)

    return format_of


def _refuse_rotations(config: Mapping[str, Any]) -> None:
    algorithms = config.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        online = next((name for name in _ONLINE if isinstance(each, dict) and each.get(name)), None)
        if online is not None:
            raise ValueError(
                f"quantization_config: algo_config: {online}={each[online]!r} rotates what goes "
                "through the model while it runs, which is not supported; supported: rotations "
                "that are part of the weights"
            )


def _format_of(stored: Mapping[str, Any]) -> StorageFormat | None:
    """The format of these settings; None: floating point."""
    weight = section(stored, "weight")
    if not weight:
        return None
    dtype = setting(weight, "dtype", None, (*_FP8, *_INT8, *_FP4))
    if dtype in _FP4:
        setting(weight, "qscheme", "per_group", ("per_group",))
        setting(weight, "group_size", 32, (32,))
        setting(weight, "scale_format", "e8m0", ("e8m0",))
        return Mxfp4ModuleFormat()
    setting(weight, "qscheme", "per_tensor", ("per_tensor", "per_channel"))
    made = Fp8Format() if dtype in _FP8 else Int8Format()
    made.takes_one_scale = weight.get("qscheme") != "per_channel"
    made.activations = _served_activations(section(stored, "input_tensors"))
    return made


def _served_activations(inputs: Mapping[str, Any]) -> ServedActivations | None:
    """The rounding of activations; None: there is none, or it is not supported."""
    if inputs.get("dtype") not in (*_FP8, *_INT8) or inputs.get("symmetric") is False:
        return None
    dtype = torch.float8_e4m3fn if inputs["dtype"] in _FP8 else torch.int8
    if inputs.get("qscheme") == "per_tensor" and not inputs.get("is_dynamic"):
        return ServedActivations(dtype, has_scale=True)
    if inputs.get("qscheme") in ("per_channel", "per_token") and inputs.get("is_dynamic"):
        return ServedActivations(dtype)
    return None
