"""GPTQ as GPTQModel and AutoGPTQ write it: ``(code - zero) * scale``."""

from __future__ import annotations

from dataclasses import replace
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
from vllm.ops.packed_linear import PackedWeight


class GptqFormat(StorageFormat):
    """GPTQ: everything lies input by input, with outputs side by side.

    ``qweight`` int32 [n * bits / 32, m]; ``qzeros`` int32 [groups, m * bits / 32]; ``scales``
    [groups, m]; ``g_idx`` [n], the group of every input. zero_offset: 1 if stored zeros are one
    too small (the first version). is_symmetric: all zeros are the middle of the codes.
    """

    name = "GPTQ"
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)

    def __init__(
        self, bits: int, group_size: int, zero_offset: int, is_symmetric: bool = False
    ) -> None:
        self.bits, self.group_size, self.zero_offset = bits, group_size, zero_offset
        self.is_symmetric = is_symmetric

    def unpack(self, stored: Reader) -> PackedWeight:
        packed = stored.get("qweight", (torch.int32,), (None, None))
        columns, rows = packed.shape[0] * 32 // self.bits, packed.shape[1]
        group_size, groups = groups_of(columns, self.group_size)
        scales = stored.finite("scales", shape=(groups, rows))
        qzeros = stored.get("qzeros", (torch.int32,), (groups, -(-rows * self.bits // 32)))
        codes = unpack_integers(packed, self.bits, 0)  # [n, m]
        zeros = unpack_integers(qzeros, self.bits, 1)[:, :rows]
        zeros = (zeros + self.zero_offset) & ((1 << self.bits) - 1)
        if self.is_symmetric:
            stored.check_zeros("qzeros", zeros, self.bits)
        order = None
        if stored.has("g_idx"):
            order = order_of_groups(stored, "g_idx", columns, group_size)
            codes = codes if order is None else codes[order]
        by_row = codes.t().contiguous(), zeros.t().contiguous(), scales.t().contiguous()
        weight = integer_weight(*by_row, self.bits, group_size, order)
        return replace(weight, outputs_first=True)
