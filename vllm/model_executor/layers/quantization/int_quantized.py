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
        shape = (rows, columns // group_size)
        scales = stored.by_group("weight_scale", shape, KERNEL_DTYPES)
        zeros = None
        if stored.has("weight_zero_point"):
            zeros = stored.by_group("weight_zero_point", shape, (torch.int8,))
            zeros = zeros.contiguous() if zeros.any() else None
        return PackedWeight(codes, scales, columns, group_size, zeros=zeros)
