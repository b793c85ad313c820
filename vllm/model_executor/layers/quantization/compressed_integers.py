"""Integers of compressed-tensors, in a byte each or in int32: ``(code - zero) * scale``."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import (
    Reader,
    StorageFormat,
    groups_of,
    integer_weight,
    order_of_groups,
    unpack_integers,
)
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.packed_linear import PackedWeight


class Int8Format(StorageFormat):
    """One code per byte: ``weight`` int8 [m, n]; ``weight_scale`` [m, groups] or one value;
    ``weight_zero_point``."""

    name = "INT8"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional = ("weight_zero_point",)

    def __init__(self, group_size: int = -1) -> None:
        self.group_size = group_size

    def unpack(self, stored: Reader) -> PackedWeight:
        codes = stored.get("weight", (torch.int8,), (None, None))
        rows, columns = codes.shape
        group_size, groups = groups_of(columns, self.group_size)
        shape = (rows, groups)
        scales = stored.by_group("weight_scale", shape, KERNEL_DTYPES)
        zeros = None
        if stored.has("weight_zero_point"):
            zeros = stored.by_group("weight_zero_point", shape, (torch.int8,))
            zeros = zeros.contiguous() if zeros.any() else None
        return PackedWeight(codes, scales, columns, group_size, zeros=zeros)


class PackQuantizedFormat(StorageFormat):
    """Several codes per int32: codes along the columns, zeros along the rows.

    ``weight_packed`` [m, n / codes in 32 bits, rounded up]; ``weight_scale`` [m, groups];
    ``weight_shape`` [2]; ``weight_zero_point``, int8 [m, groups] by old writers;
    ``weight_g_idx`` [n], the group of every input.
    """

    name = "pack-quantized"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape")
    optional = ("weight_zero_point", "weight_g_idx")

    def __init__(self, bits: int, group_size: int = -1) -> None:
        self.bits, self.group_size = bits, group_size

    def unpack(self, stored: Reader) -> PackedWeight:
        rows, columns = stored.get("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        per = 32 // self.bits
        packed = stored.get("weight_packed", (torch.int32,), (rows, -(-columns // per)))
        group_size, groups = groups_of(columns, self.group_size)
        scales = stored.by_group("weight_scale", (rows, groups), KERNEL_DTYPES)
        order = None
        if stored.has("weight_g_idx"):
            order = order_of_groups(stored, "weight_g_idx", columns, group_size)
        zeros = self._zeros(stored, scales.shape)
        if self.bits == 4 and order is None:  # the bytes of the integers are in order
            halves = packed.contiguous().view(torch.uint8)[:, : -(-columns // 2)]
            return integer_weight(halves, zeros, scales, 4, group_size, columns=columns)
        codes = unpack_integers(packed, self.bits, 1)[:, :columns]
        codes = codes if order is None else codes[:, order]
        return integer_weight(codes, zeros, scales, self.bits, group_size, order)

    def _zeros(self, stored: Reader, shape: torch.Size) -> torch.Tensor:
        """Zeros, uint8 [m, groups], counted from the smallest code like the codes."""
        rows, groups = shape
        middle = 1 << (self.bits - 1)
        if not stored.has("weight_zero_point"):
            return torch.full(shape, middle, dtype=torch.uint8)
        packed = stored.get("weight_zero_point", (torch.int32, torch.int8))
        if packed.dtype is torch.int8:
            zeros = stored.by_group("weight_zero_point", (rows, groups), (torch.int8,))
            if not -middle <= zeros.min() <= zeros.max() < middle:
                raise stored.fail(
                    "weight_zero_point",
                    f"is {zeros.min()} to {zeros.max()}, expected {-middle} to {middle - 1}",
                )
            return (zeros.to(torch.int16) + middle).to(torch.uint8)
        stored.get("weight_zero_point", (torch.int32,), (-(-rows * self.bits // 32), groups))
        return unpack_integers(packed, self.bits, 0)[:rows]
