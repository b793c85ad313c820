"""Finds the storage format of each module in a checkpoint's ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from vllm.model_executor.layers.quantization.auto_round import read_auto_round
from vllm.model_executor.layers.quantization.awq import AwqByRowFormat, AwqFormat
from vllm.model_executor.layers.quantization.bitsandbytes import read_bitsandbytes
from vllm.model_executor.layers.quantization.compressed_tensors import read_compressed_tensors
from vllm.model_executor.layers.quantization.fp4 import Mxfp4ExpertsFormat, Nvfp4ModeloptFormat
from vllm.model_executor.layers.quantization.fp8 import Fp8Format, Mxfp8Format, with_experts
from vllm.model_executor.layers.quantization.gptq import GptqFormat
from vllm.model_executor.layers.quantization.ignore_list import IgnoreList, without_ignored
from vllm.model_executor.layers.quantization.quark import read_quark
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    block_of,
    expression,
    section,
    setting,
    whole_number,
)
from vllm.ops.served_activations import ServedActivations
from vllm.utils.text import did_you_mean

_SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
"""Other names of a quant_method."""


def read_quantization(config: Mapping[str, Any]) -> FormatOf:
    """Read the formats of modules. ValueError: a method or setting is not supported."""
    method = str(config.get("quant_method")).lower()
    method = _SPELLINGS.get(method, method)
    if method not in READERS:
        raise ValueError(
            f"quantization_config: quant_method={config.get('quant_method')!r} is not supported"
            f"{did_you_mean(method, READERS)}; supported: {', '.join(sorted(READERS))}; "
            "or what transformers' model.dequantize() makes of it, saved"
        )
    return without_ignored(READERS[method](config), IgnoreList(config))


_E4M3 = torch.float8_e4m3fn


def _everywhere(made: StorageFormat) -> FormatOf:
    return lambda module, names: made


def _read_fp8(config: Mapping[str, Any]) -> FormatOf:
    setting(config, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    scheme = setting(config, "activation_scheme", "dynamic", ("dynamic", "static"))
    powers = setting(config, "scale_fmt", None, ("float", "ue8m0", None)) == "ue8m0"
    served = ServedActivations(_E4M3, has_scale=scheme == "static", powers_of_two=powers)
    if config.get("weight_block_size") is None:
        return with_experts(Fp8Format(activations=served))
    block = block_of(config, "weight_block_size")
    if scheme != "static":
        served = ServedActivations(_E4M3, block[1], powers_of_two=powers)
    return with_experts(Fp8Format(block, activations=served))


def _read_fbgemm(config: Mapping[str, Any]) -> FormatOf:
    bound = config.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, int | float) and bound > 0):
        raise ValueError(f"quantization_config: activation_scale_ub={bound!r} has to be above 0")
    made = Fp8Format(activations=ServedActivations(_E4M3, bound=bound))
    made.takes_one_scale = False
    return _everywhere(made)


_AWQ_BY_INPUT = ("gemm", "GEMM", "exllama", "ipex")
"""Kernels of AWQ that read the same tensors."""
_AWQ_BY_ROW = ("gemv", "GEMV")


def _read_awq(config: Mapping[str, Any]) -> FormatOf:
    setting(config, "bits" if "bits" in config else "w_bit", 4, (4,))
    version = "version" if "version" in config else "format"
    found = setting(config, version, "gemm", (*_AWQ_BY_INPUT, *_AWQ_BY_ROW))
    made = AwqFormat if found in _AWQ_BY_INPUT else AwqByRowFormat
    name = "group_size" if "group_size" in config else "q_group_size"
    return _everywhere(made(whole_number(config, name, 128)))


def _read_mxfp4(config: Mapping[str, Any]) -> FormatOf:
    return _everywhere(Mxfp4ExpertsFormat())


def _read_gptq(config: Mapping[str, Any]) -> FormatOf:
    def make(settings: Mapping[str, Any]) -> GptqFormat:
        version = "checkpoint_format" if "checkpoint_format" in settings else "format"
        found = setting(settings, version, "gptq", ("gptq", "gptq_v2"))
        bits = setting(settings, "bits", None, (2, 3, 4, 8))
        group_size = whole_number(settings, "group_size", 128)
        is_symmetric = setting(settings, "sym", False, (True, False))
        made = GptqFormat(bits, group_size, int(found == "gptq"), is_symmetric)
        if setting(settings, "desc_act", False, (True, False)):
            made.announced = ("g_idx",)
        return made

    usual, dynamic = make(config), section(config, "dynamic")
    # "+:" or no prefix: other settings for the modules that match. IgnoreList reads "-:".
    others = [
        (
            expression(pattern.removeprefix("+:"), "dynamic"),
            make({**config, **section(dynamic, pattern)}),
        )
        for pattern in dynamic
        if not pattern.startswith("-:")
    ]

    def format_of(module: str, names: Collection[str]) -> StorageFormat:
        return next((made for pattern, made in others if pattern.match(module)), usual)

    return format_of


_MODELOPT = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8",
    "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION",
)  # fmt: skip


def _read_modelopt(config: Mapping[str, Any]) -> FormatOf:
    if config.get("quant_algo") is None:  # only the cache is quantised
        return lambda module, names: None
    algorithm = setting(config, "quant_algo", None, _MODELOPT)
    by_row = algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    fp8 = Fp8Format(activations=ServedActivations(_E4M3, has_scale=not by_row))
    nvfp4 = Nvfp4ModeloptFormat()
    others = {"FP8_PB_WO": Fp8Format((128, 128)), "MXFP8": Mxfp8Format()}

    def format_of(module: str, names: Collection[str]) -> StorageFormat:
        if f"{module}.weight_scale_2" in names:
            return nvfp4
        return others.get(algorithm, fp8)

    return format_of


READERS: Mapping[str, Callable[[Mapping[str, Any]], FormatOf]] = {
    "auto-round": read_auto_round,
    "awq": _read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": _read_fbgemm,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "quark": read_quark,
}
"""quant_method -> the reader of its config."""
