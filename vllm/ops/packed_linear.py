"""Products with weights of 8 and 4 bits, unpacked on the way.

A packed weight [m, n] is a code for every element and, for every row and *group* of elements, a
scale and perhaps a zero::

    weight = (value(code) - zero) * scale      in float32, rounded once to the dtype of x

Codes of 8 bits are int8 or float8_e4m3fn and are their own values; codes of 4 bits are numbers of
entries in a table of 16 values, two codes a byte, the first one in the low half. Element j of a
row belongs to group ``j // group_size``; the last group may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from vllm.ops.linear import PANEL_COLUMNS, linear
from vllm.ops.operation import KERNEL_DTYPES, TensorStruct, Written, operation, source_of

INT4_VALUES = tuple(float(code - 8) for code in range(16))
FP4_VALUES = tuple(s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3)."""

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Of codes of 8 bits; those of 4 are uint8, by twos."""


@dataclass(frozen=True)
class PackedPanels(TensorStruct):
    """A packed weight in panels of 64 outputs, as the CPU's products read it.

    codes: [m / 64, n / 2, 64, 2] (4 bits: [m / 64, n / 2, 64]), pairs of terms side by side;
    table: float32 [16], with codes of 4 bits; scales: float32, bfloat16 or float16
    [m / 64, groups, 64]; zeros: int8, likewise. m and n are rounded up.
    """

    codes: torch.Tensor
    table: torch.Tensor | None
    scales: torch.Tensor
    zeros: torch.Tensor | None

    operator_tensors = ("codes", "table", "scales", "zeros")


@operation
def packed_linear(
    x: torch.Tensor,
    panels: PackedPanels,
    group_size: int,
    bias: torch.Tensor | None,
    out: Written,
) -> None:
    """``x @ weight.T + bias``, added up as :func:`vllm.ops.linear.linear` does.

    x: [rows, n], strided; panels: of the weight [m, n]; group_size: even, or at least n; bias:
    [m]; out: [rows, m], strided. On the CPU a row has the same bits for any number of rows: those
    of the dequantised weight.
    """
    weight = weight_of_packed_panels(panels, group_size, (out.shape[1], x.shape[1])).dequantise(
        x.dtype
    )
    linear.body(x, weight, bias, out)


@packed_linear.contract
def _(
    x: torch.Tensor,
    panels: PackedPanels,
    group_size: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows, terms = x.shape
    assert x.dtype is out.dtype and out.shape[0] == rows
    codes, scales = panels.codes, panels.scales
    blocks, groups = -(-out.shape[1] // PANEL_COLUMNS), -(-terms // group_size)
    cells = (blocks, -(-terms // 2), PANEL_COLUMNS)
    if panels.table is None:
        assert codes.dtype in CODE_DTYPES and codes.shape == (*cells, 2)
    else:
        assert codes.dtype is torch.uint8 and codes.shape == cells
        assert panels.table.shape == (16,) and panels.table.dtype is torch.float32
    assert scales.shape == (blocks, groups, PANEL_COLUMNS) and scales.dtype in KERNEL_DTYPES
    assert group_size % 2 == 0 or group_size >= terms
    assert panels.zeros is None or panels.zeros.shape == scales.shape
    assert all(t is None or t.is_contiguous() for t in panels.flat())
    assert (x.stride(1) == 1 or terms <= 1) and (out.stride(1) == 1 or out.shape[1] <= 1)
    assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())


def unpacks_weights(device: torch.device) -> bool:
    """Whether products on that device unpack weights on the way."""
    return source_of(device.type).reads_panels and packed_linear.is_overridden(device.type)


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [m, n], row by row.

    codes: [m, n], or uint8 [m, n / 2 rounded up] with ``table``; scales: [m, groups] float32,
    bfloat16 or float16; zeros: int8, likewise, or None; order: int64 [n], which input each
    element is multiplied with, or None: its own.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int
    group_size: int
    table: tuple[float, ...] | None = None
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.columns))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def pack(self) -> PackedWeight:
        """Itself: what can be packed is asked so."""
        return self

    def can_be_panels(self) -> bool:
        """Whether :func:`packed_linear` takes it: pairs of terms have one scale."""
        return self.group_size % 2 == 0 or self.group_size >= self.columns

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [m, n] in that dtype."""
        weight = self._values()
        if self.zeros is not None:
            weight = weight - self._by_element(self.zeros)
        weight = (weight * self._by_element(self.scales)).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _values(self) -> torch.Tensor:
        if self.table is None:
            return self.codes.float()
        table = torch.tensor(self.table, device=self.device)
        halves = torch.stack([self.codes & 15, self.codes >> 4], dim=2)
        return table[halves.flatten(1)[:, : self.columns].long()]

    def _by_element(self, by_group: torch.Tensor) -> torch.Tensor:
        return by_group.float().repeat_interleave(self.group_size, 1)[:, : self.columns]

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Rows (0) or columns (1) of it; ValueError: columns that do not begin with a group."""
        if dim == 0:
            return self._map(lambda tensor: tensor.narrow(0, start, length))
        if (start, length) == (0, self.columns):
            return self
        if self.order is not None or start % self.group_size or length % self.group_size:
            raise ValueError(
                f"columns {start} to {start + length} of a weight whose {self.columns} columns are "
                f"packed in groups of {self.group_size} cannot be held alone; use a "
                "tensor_parallel_size that leaves groups whole"
            )
        per = 1 if self.table is None else 2
        first, groups = start // self.group_size, length // self.group_size
        return replace(
            self,
            codes=self.codes.narrow(1, start // per, length // per),
            scales=self.scales.narrow(1, first, groups),
            zeros=None if self.zeros is None else self.zeros.narrow(1, first, groups),
            columns=length,
        )

    def fits(self, other: PackedWeight) -> bool:
        """Whether the rows of ``other`` may stand below these."""
        return (
            self.codes.dtype is other.codes.dtype
            and self.scales.dtype is other.scales.dtype
            and (self.columns, self.group_size) == (other.columns, other.group_size)
            and self.table == other.table
            and (self.zeros is None) is (other.zeros is None)
            and _same(self.order, other.order)
        )

    def above(self, other: PackedWeight) -> PackedWeight:
        """One weight of these rows and those of ``other``, which fits."""
        zeros = None
        if self.zeros is not None and other.zeros is not None:
            zeros = torch.cat([self.zeros, other.zeros])
        return replace(
            self,
            codes=_cat_bytes(self.codes, other.codes),
            scales=torch.cat([self.scales, other.scales]),
            zeros=zeros,
        )

    def make_panels(self) -> PackedPanels:
        """Its panels: copies."""
        assert self.can_be_panels()
        device = self.device
        return PackedPanels(
            codes=self._panels_of_codes(),
            table=None if self.table is None else torch.tensor(self.table, device=device),
            scales=_panels_of_groups(self.scales),
            zeros=None if self.zeros is None else _panels_of_groups(self.zeros),
        )

    def _panels_of_codes(self) -> torch.Tensor:
        per = 2 if self.table is None else 1
        rows, width = self.codes.shape
        blocks, cells = -(-rows // PANEL_COLUMNS), -(-width // per)
        made = self.codes.new_zeros((blocks * PANEL_COLUMNS, cells * per), dtype=torch.uint8)
        made[:rows, :width] = self.codes.view(torch.uint8)
        shaped = made.view(blocks, PANEL_COLUMNS, cells, per).permute(0, 2, 1, 3).contiguous()
        panels = shaped.view(self.codes.dtype)
        return panels if self.table is None else panels.squeeze(3)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
        )


def weight_of_packed_panels(
    panels: PackedPanels, group_size: int, shape: tuple[int, int]
) -> PackedWeight:
    """The weight of that shape that the panels were made of, without its order."""
    rows, columns = shape
    width = columns if panels.table is None else -(-columns // 2)
    codes = panels.codes.view(torch.uint8)
    codes = codes.unsqueeze(3) if codes.dim() == 3 else codes
    whole = codes.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:rows, :width]
    return PackedWeight(
        codes=whole.contiguous().view(panels.codes.dtype),
        scales=panels.scales.transpose(1, 2).flatten(0, 1)[:rows],
        columns=columns,
        group_size=group_size,
        table=None if panels.table is None else tuple(panels.table.tolist()),
        zeros=None if panels.zeros is None else panels.zeros.transpose(1, 2).flatten(0, 1)[:rows],
    )


def _panels_of_groups(by_row: torch.Tensor) -> torch.Tensor:
    """[m, groups] -> [m / 64, groups, 64]."""
    padded = functional.pad(by_row, (0, 0, 0, -len(by_row) % PANEL_COLUMNS))
    return padded.reshape(-1, PANEL_COLUMNS, by_row.shape[1]).transpose(1, 2).contiguous()


def _cat_bytes(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Of any dtype of one byte."""
    return torch.cat([above.view(torch.uint8), below.view(torch.uint8)]).view(above.dtype)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
