"""From a checkpoint's ``quantization_config`` to the storage format of each of its modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from vllm.model_executor.layers.quantization.awq import AwqFormat
from vllm.model_executor.layers.quantization.compressed_tensors import read_compressed_tensors
from vllm.model_executor.layers.quantization.fp8 import Fp8Format
from vllm.model_executor.layers.quantization.gptq import GptqFormat
from vllm.model_executor.layers.quantization.ignore_list import IgnoreList, without_ignored
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4ExpertsFormat
from vllm.model_executor.layers.quantization.nvfp4 import Nvfp4ModeloptFormat
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    setting,
    whole_number,
)
from vllm.ops.served_activations import ServedActivations
from vllm.utils.text import did_you_mean


def read_quantization(config: Mapping[str, Any]) -> FormatOf:
    """Which format a module is stored in. ValueError: a method or setting that is not supported."""
    method = str(config.get("quant_method"))
    if method not in READERS:
        raise ValueError(
            f"quantization_config: quant_method={method!r} is not supported"
            f"{did_you_mean(method, READERS)}; supported: {', '.join(sorted(READERS))}"
        )
    return without_ignored(READERS[method](config), IgnoreList(config))


_E4M3 = torch.float8_e4m3fn


def _everywhere(made: StorageFormat) -> FormatOf:
    return lambda module, names: made


def _read_fp8(config: Mapping[str, Any]) -> FormatOf:
    setting(config, "fmt", "e4m3", ("e4m3", "float8_e4m3fn", None))
    scheme = setting(config, "activation_scheme", "dynamic", ("dynamic", "static", None))
    served = ServedActivations(_E4M3, has_scale=scheme == "static")
    block = config.get("weight_block_size")
    if block is None:
        return _everywhere(Fp8Format(activations=served))
    is_block = isinstance(block, list | tuple) and len(block) == 2
    if not is_block or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(
            f"quantization_config: weight_block_size={block!r} has to be two numbers above 0"
        )
    if scheme != "static":
        served = ServedActivations(_E4M3, block[1])
    return _everywhere(Fp8Format((block[0], block[1]), activations=served))


def _read_fbgemm(config: Mapping[str, Any]) -> FormatOf:
    bound = config.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, int | float) and bound > 0):
        raise ValueError(f"quantization_config: activation_scale_ub={bound!r} has to be above 0")
    return _everywhere(Fp8Format(activations=ServedActivations(_E4M3, bound=bound)))


def _read_awq(config: Mapping[str, Any]) -> FormatOf:
    setting(config, "bits" if "bits" in config else "w_bit", 4, (4,))
    setting(config, "version" if "version" in config else "format", "gemm", ("gemm", "GEMM"))
    name = "group_size" if "group_size" in config else "q_group_size"
    return _everywhere(AwqFormat(whole_number(config, name, 128)))


def _read_mxfp4(config: Mapping[str, Any]) -> FormatOf:
    return _everywhere(Mxfp4ExpertsFormat())


def _read_gptq(config: Mapping[str, Any]) -> FormatOf:
    def make(settings: Mapping[str, Any]) -> GptqFormat:
        version = "checkpoint_format" if "checkpoint_format" in settings else "format"
        found = setting(settings, version, "gptq", ("gptq", "gptq_v2"))
        bits = setting(settings, "bits", None, (4, 8))
        return GptqFormat(bits, whole_number(settings, "group_size", 128), int(found == "gptq"))

    usual = make(config)
    dynamic = config.get("dynamic") or {}
    # "+:" or nothing: other settings of the modules that match; "-:" is for IgnoreList.
    others = [
        (re.compile(pattern.removeprefix("+:")), make({**config, **settings}))
        for pattern, settings in dynamic.items()
        if not pattern.startswith("-:")
    ]

    def format_of(module: str, names: Collection[str]) -> StorageFormat:
        return next((made for pattern, made in others if pattern.match(module)), usual)

    return format_of


def _read_modelopt(config: Mapping[str, Any]) -> FormatOf:
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")
    algorithm = setting(config, "quant_algo", None, (*algorithms, "MIXED_PRECISION"))
    by_row = algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    fp8 = Fp8Format(activations=ServedActivations(_E4M3, has_scale=not by_row))
    nvfp4 = Nvfp4ModeloptFormat()
    blocks = Fp8Format((128, 128))

    def format_of(module: str, names: Collection[str]) -> StorageFormat:
        if f"{module}.weight_scale_2" in names:
            return nvfp4
        return blocks if config["quant_algo"] == "FP8_PB_WO" else fp8

    return format_of


READERS: Mapping[str, Callable[[Mapping[str, Any]], FormatOf]] = {
    "awq": _read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": _read_fbgemm,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
"""quant_method -> its reader."""
