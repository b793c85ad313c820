"""AWQ as AutoAWQ writes it for its "gemm" and "gemv" kernels: ``(code - zero) * scale``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import (
    Reader,
    StorageFormat,
    groups_of,
    integer_weight,
    unpack_integers,
)
from vllm.ops.packed_linear import PackedWeight

_BITS, _PER = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of outputs 0 to 7 among the eight codes of an integer: the even ones come first."""


class AwqFormat(StorageFormat):
    """AWQ for "gemm": eight outputs in an int32, input by input.

    ``qweight`` [n, m / 8]; ``qzeros`` [groups, m / 8]; ``scales`` [groups, m].
    """

    name = "AWQ"
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def unpack(self, stored: Reader) -> PackedWeight:
        packed = stored.get("qweight", (torch.int32,), (None, None))
        columns, rows = packed.shape[0], packed.shape[1] * _PER
        group_size, groups = groups_of(columns, self.group_size)
        scales = stored.finite("scales", shape=(groups, rows))
        qzeros = stored.get("qzeros", (torch.int32,), (groups, packed.shape[1]))
        codes, zeros = _outputs(packed), _outputs(qzeros)
        weight = integer_weight(codes, zeros, scales.t().contiguous(), _BITS, group_size)
        return replace(weight, outputs_first=True)


class AwqByRowFormat(AwqFormat):
    """AWQ for "gemv": eight inputs in an int32, output by output.

    ``qweight`` [m, n / 8]; ``qzeros`` [m, groups / 8, rounded up to 2 or 4 for groups of 64 or
    32]; ``scales`` [m, 8 times as many], of which the last ones belong to no group.
    """

    def unpack(self, stored: Reader) -> PackedWeight:
        packed = stored.get("qweight", (torch.int32,), (None, None))
        rows, columns = packed.shape[0], packed.shape[1] * _PER
        group_size, groups = groups_of(columns, self.group_size)
        multiple = _PER * max(128 // group_size, 1)
        held = -(-groups // multiple) * multiple
        scales = stored.finite("scales", shape=(rows, held))
        qzeros = stored.get("qzeros", (torch.int32,), (rows, held // _PER))
        zeros = unpack_integers(qzeros, _BITS, 1)[:, :groups].contiguous()
        scales = scales[:, :groups].contiguous()
        halves = packed.contiguous().view(torch.uint8)  # bytes lie in the order of the inputs
        weight = integer_weight(halves, zeros, scales, _BITS, group_size, columns=columns)
        return replace(weight, outputs_first=True)


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """int32 [k, m / 8] -> uint8 [m, k]."""
    codes = unpack_integers(packed, _BITS, 1).view(*packed.shape, _PER)
    return codes[:, :, list(_PLACES)].flatten(1).t().contiguous()
