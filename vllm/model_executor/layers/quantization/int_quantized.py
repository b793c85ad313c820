"""INT8 of compressed-tensors' ``int-quantized``: ``(code - zero) * scale``."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import Reader, StorageFormat
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.packed_linear import PackedWeight


class Int8Format(StorageFormat):
    """``weight`` int8 [m, n]; ``weight_scale`` [m, groups] or one; ``weight_zero_point``."""

    name = "INT8"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional = ("weight_zero_point",)

    def __init__(self, group_size: int = -1) -> None:
        self.group_size = group_size

    def unpack(self, stored: Reader) -> PackedWeight:
        codes = stored.get("weight", (torch.int8,), (None, None))
        rows, columns = codes.shape
        group_size = stored.check_group_size("weight", columns, self.group_size)
        scales = _by_row(stored, "weight_scale", (rows, columns // group_size), KERNEL_DTYPES)
        zeros = None
        if stored.has("weight_zero_point"):
            shape = (rows, columns // group_size)
            zeros = _by_row(stored, "weight_zero_point", shape, (torch.int8,))
            zeros = zeros.contiguous() if zeros.any() else None
        return PackedWeight(codes, scales, columns, group_size, zeros=zeros)


def _by_row(
    stored: Reader, leaf: str, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """A value a row and group, or one for all of them."""
    values = stored.finite(leaf, dtypes)
    if values.numel() == 1:
        return values.reshape(1, 1).expand(shape)
    if tuple(values.shape) not in (shape, shape[:1] if shape[1] == 1 else shape):
        raise stored.fail(leaf, f"has shape {tuple(values.shape)}, expected {shape} or one value")
    return values.reshape(shape)
