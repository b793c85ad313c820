"""FP4 (E2M1) with scales of 8 bits: NVFP4 and MXFP4.

NVFP4 has an FP8 scale for every 16 elements and one float32 scale for the tensor. MXFP4 has a power
of two for every 32 elements, ``value * 2 ** (scale - 127)``. Sources: OCP Microscaling Formats 1.0;
GPT-OSS for its experts.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import (
    Reader,
    StorageFormat,
    groups_of,
)
from vllm.ops.packed_linear import FP4_VALUES, PackedExperts, PackedWeight

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


class Nvfp4PackedFormat(StorageFormat):
    """NVFP4 of compressed-tensors: ``value * (weight_scale / weight_global_scale)``.

    ``weight_packed`` uint8 [m, n / 2]; ``weight_scale`` float8_e4m3fn [m, n / 16].
    """

    name = "NVFP4 of compressed-tensors"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_global_scale")

    def unpack(self, stored: Reader) -> PackedWeight:
        divisor = _whole_scale(stored, "weight_global_scale")
        factor = (1 / divisor.double()).float()
        if not factor.isfinite():
            raise stored.fail(
                "weight_global_scale", f"is {divisor.item():g}, by which nothing can be divided"
            )
        return _unpack_nvfp4(stored, "weight_packed", factor)


class Nvfp4ModeloptFormat(StorageFormat):
    """NVFP4 of ModelOpt: ``value * (weight_scale * weight_scale_2)``.

    ``weight`` uint8 [m, n / 2]; ``weight_scale`` float8_e4m3fn [m, n / 16].
    """

    name = "NVFP4 of ModelOpt"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_2")

    def unpack(self, stored: Reader) -> PackedWeight:
        return _unpack_nvfp4(stored, "weight", _whole_scale(stored, "weight_scale_2"))


def _whole_scale(stored: Reader, leaf: str) -> torch.Tensor:
    scale = stored.finite(leaf, (torch.float32,))
    if scale.numel() != 1:
        raise stored.fail(leaf, f"has shape {tuple(scale.shape)}, expected one value")
    return scale.reshape(())


def _unpack_nvfp4(stored: Reader, leaf: str, factor: torch.Tensor) -> PackedWeight:
    codes = stored.get(leaf, (torch.uint8,), (None, None))
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    _, groups = groups_of(columns, _NVFP4_GROUP)
    scales = stored.finite("weight_scale", (torch.float8_e4m3fn,), (rows, groups))
    factors = factor.expand(rows).contiguous()
    return PackedWeight(codes, scales, columns, _NVFP4_GROUP, FP4_VALUES, factors=factors)


class Mxfp4Format(StorageFormat):
    """``weight_packed`` uint8 [m, n / 2]; ``weight_scale`` uint8 [m, n / 32]."""

    name = "MXFP4"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")

    def unpack(self, stored: Reader) -> PackedWeight:
        leaf = self.required[0]
        codes = stored.get(leaf, (torch.uint8,), (None, None))
        columns = 2 * codes.shape[1]
        _, groups = groups_of(columns, _MXFP4_GROUP)
        scales = stored.powers_of_two("weight_scale", (codes.shape[0], groups))
        return PackedWeight(codes, scales, columns, _MXFP4_GROUP, FP4_VALUES)


class Mxfp4ModuleFormat(Mxfp4Format):
    """MXFP4 of Quark: ``weight`` uint8 [m, n / 2]; ``weight_scale``."""

    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")


class Mxfp4ExpertsFormat(StorageFormat):
    """Experts of GPT-OSS: ``NAME_blocks`` uint8 [experts, m, n / 32, 16], ``NAME_scales`` uint8
    [experts, m, n / 32].
    """

    name = "MXFP4"
    required: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    separator = "_"

    def unpack(self, stored: Reader) -> PackedExperts:
        blocks = stored.get("blocks", (torch.uint8,), (None, None, None, _MXFP4_GROUP // 2))
        scales = stored.powers_of_two("scales", blocks.shape[:3])
        columns = _MXFP4_GROUP * blocks.shape[2]
        return PackedExperts(
            tuple(
                PackedWeight(codes.flatten(1), scale, columns, _MXFP4_GROUP, FP4_VALUES)
                for codes, scale in zip(blocks, scales, strict=True)
            ),
            inputs_first=True,
        )
