"""NVFP4: FP4 (E2M1), an FP8 scale for every 16 elements, one float32 scale for the tensor."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import Reader, StorageFormat
from vllm.ops.packed_linear import FP4_VALUES, PackedWeight

_GROUP = 16


class Nvfp4PackedFormat(StorageFormat):
    """compressed-tensors: ``value * (weight_scale / weight_global_scale)``.

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
        return _unpack(stored, "weight_packed", factor)


class Nvfp4ModeloptFormat(StorageFormat):
    """ModelOpt: ``value * (weight_scale * weight_scale_2)``.

    ``weight`` uint8 [m, n / 2]; ``weight_scale`` float8_e4m3fn [m, n / 16].
    """

    name = "NVFP4 of ModelOpt"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_2")

    def unpack(self, stored: Reader) -> PackedWeight:
        return _unpack(stored, "weight", _whole_scale(stored, "weight_scale_2"))


def _whole_scale(stored: Reader, leaf: str) -> torch.Tensor:
    scale = stored.finite(leaf, (torch.float32,))
    if scale.numel() != 1:
        raise stored.fail(leaf, f"has shape {tuple(scale.shape)}, expected one value")
    return scale.reshape(())


def _unpack(stored: Reader, leaf: str, factor: torch.Tensor) -> PackedWeight:
    codes = stored.get(leaf, (torch.uint8,), (None, None))
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    stored.check_group_size(leaf, columns, _GROUP)
    scales = stored.scales_by_row("weight_scale", (rows, columns), _GROUP, (torch.float8_e4m3fn,))
    factors = factor.expand(rows).contiguous()
    return PackedWeight(codes, scales, columns, _GROUP, FP4_VALUES, factors=factors)
