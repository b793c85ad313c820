"""Products with weights of 8 and 4 bits, unpacked on the way.

A packed weight [m, n] has a code for every element, and for every row and *group* of elements a
scale and sometimes a zero::

    weight = (value(code) - zero) * scale * factor

Codes of 8 bits are int8 or float8_e4m3fn and are their own values. Codes of 4 bits are indices into
a table of 16 values, two codes per byte, the first one in the low half. Element j of a row belongs
to group ``j // group_size``; the last group may be shorter. A factor is one number per row, for
formats whose scales have 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.nn import functional

from vllm.ops.linear import PANEL_COLUMNS, linear, write_panels
from vllm.ops.operation import KERNEL_DTYPES, TensorStruct, Written, operation, source_of
from vllm.ops.served_activations import ServedActivations
from vllm.utils.host_memory import empty_in_large_pages

INT4_VALUES = tuple(float(code - 8) for code in range(16))
FP4_VALUES = tuple(s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3)."""

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of codes of 8 bits; those of 4 bits are uint8, two per byte."""


SCALE_DTYPES = (*KERNEL_DTYPES, torch.float8_e4m3fn, torch.float8_e8m0fnu)

_TERMS_OF_A_CHUNK = {8: 2, 4: 8}
"""By the bits of a code, as in csrc/cpu/packed_codes.h."""
_FEWEST_TERMS = 8
"""Fewest terms of a group: kFewestTerms of csrc/cpu/packed_linear.cpp."""


@dataclass(frozen=True)
class PackedPanels(TensorStruct):
    """A packed weight in panels of 64 outputs, as the CPU's products read it.

    codes: [m / 64, n / 2, 64, 2], pairs of terms side by side, or for 4 bits uint8 [m / 64, n / 8,
    64, 4], eight terms; table: float32 [16], with codes of 4 bits; scales: [m / 64, groups, 64] of
    a dtype in SCALE_DTYPES; factors: float32 [m / 64, 64]; zeros: int8, shaped like scales. m and n
    are rounded up.
    """

    codes: torch.Tensor
    table: torch.Tensor | None
    scales: torch.Tensor
    factors: torch.Tensor | None
    zeros: torch.Tensor | None

    operator_tensors = ("codes", "table", "scales", "factors", "zeros")


@operation
def packed_linear(
    x: torch.Tensor,
    panels: PackedPanels,
    group_size: int,
    x_scales: torch.Tensor | None,
    x_is_whole: bool,
    bias: torch.Tensor | None,
    out: Written,
) -> None:
    """``(x * x_scales) @ weight.T + bias``; only sums are rounded, in float32.

    x: [rows, n], strided; panels: of the weight [m, n]; group_size: a multiple of 8 (for codes of
    8 bits: an even number from 8 on), or at least n; x_scales: float32 [rows, groups] or [rows, 1];
    x_is_whole: x holds codes of int8, which CPUs with integer products multiply as such; bias: [m];
    out: [rows, m], strided. With zeros, codes of 4 bits need a table of consecutive whole numbers.
    On the CPU a row has the same bits for any number of rows: the terms of a block (a group, or 512
    or 1,024 terms of a longer one) are summed as in :func:`vllm.ops.linear.linear`, and then the
    blocks' sums, times their scales, in order. Codes of 4 bits with scales of 8 bits have the
    blocks of a float weight, and no x_scales by group.
    """
    packed = weight_of_packed_panels(panels, group_size, (out.shape[1], x.shape[1]))
    given = x.float()
    if x_scales is not None:
        size = x.shape[1] if x_scales.shape[1] == 1 else group_size
        given = given * x_scales.repeat_interleave(size, 1)[:, : x.shape[1]]
    exact = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    added = None if bias is None else bias.float()
    linear.body(given, packed.dequantise(torch.float32), added, exact)
    out.copy_(exact)


@packed_linear.contract
def _(
    x: torch.Tensor,
    panels: PackedPanels,
    group_size: int,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows, terms = x.shape
    assert x.dtype is out.dtype and out.shape[0] == rows
    codes, scales = panels.codes, panels.scales
    blocks, groups = -(-out.shape[1] // PANEL_COLUMNS), -(-terms // group_size)
    assert _is_group_of_chunks(group_size, terms, 8 if panels.table is None else 4)
    if panels.table is None:
        assert codes.dtype in CODE_DTYPES
        assert codes.shape == (blocks, -(-terms // 2), PANEL_COLUMNS, 2)
    else:
        assert codes.dtype is torch.uint8
        assert codes.shape == (blocks, -(-terms // 8), PANEL_COLUMNS, 4)
        assert panels.table.shape == (16,) and panels.table.dtype is torch.float32
    assert scales.shape == (blocks, groups, PANEL_COLUMNS) and scales.dtype in SCALE_DTYPES
    assert panels.factors is None or panels.factors.shape == (blocks, PANEL_COLUMNS)
    assert panels.zeros is None or panels.zeros.shape == scales.shape
    assert all(t is None or t.is_contiguous() for t in panels.flat)
    assert (x.stride(1) == 1 or terms <= 1) and (out.stride(1) == 1 or out.shape[1] <= 1)
    assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())
    assert x_scales is None or (
        x_scales.dtype is torch.float32
        and x_scales.is_contiguous()
        and x_scales.shape in ((rows, 1), (rows, groups))
        and (x_scales.shape[1] == 1 or scales.dtype in KERNEL_DTYPES or panels.table is None)
    )


def _is_group_of_chunks(group_size: int, terms: int, bits: int) -> bool:
    is_whole = group_size >= _FEWEST_TERMS and group_size % _TERMS_OF_A_CHUNK[bits] == 0
    return is_whole or group_size >= terms


def unpacks_weights(device: torch.device) -> bool:
    """Tell whether products on that device unpack weights on the way."""
    return source_of(device.type).reads_panels and packed_linear.is_overridden(device.type)


class CutGroupError(ValueError):
    """A cut along the columns of a weight would split a group."""


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [m, n], row by row.

    codes: [m, n], or uint8 [m, n / 2 rounded up] with ``table``; scales: [m, groups] of a dtype
    in SCALE_DTYPES; zeros: int8, likewise, or None; order: int64 [n], the input by which each
    element is multiplied, or None: its own; factors: float32 [m], or None: 1; activations: the
    rounding of inputs, or None: there is none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int
    group_size: int
    table: tuple[float, ...] | None = None
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    activations: ServedActivations | None = None
    outputs_first: bool = False
    """True for [outputs, inputs] in every family; otherwise the weight lies like the float one."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.columns))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def can_be_panels(self) -> bool:
        """Tell whether :func:`packed_linear` takes it: the terms of a chunk have one scale, and
        values of codes are exact in bfloat16 (NF4's are not)."""
        if self.table is not None:
            values = torch.tensor(self.table)
            if not torch.equal(values.bfloat16().float(), values):
                return False
        return _is_group_of_chunks(self.group_size, self.columns, 8 if self.table is None else 4)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [m, n] in that dtype: rounded to float32, and then once more."""
        weight = self._values()
        if self.zeros is not None:
            weight = weight - self._by_element(self.zeros)
        scales = self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors[:, None]
        weight = (weight * self._by_element(scales)).to(dtype)
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

    def with_activations(self, rule: ServedActivations) -> PackedWeight:
        return replace(self, activations=rule)

    def select_rows(self, rows: slice) -> PackedWeight:
        """Return some of its rows."""
        return self._with_rows(lambda tensor: tensor[rows])

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Return consecutive rows (0) or columns (1). CutGroupError: they cannot be had alone."""
        if dim == 0:
            return self._with_rows(lambda tensor: tensor.narrow(0, start, length))
        if (start, length) == (0, self.columns):
            return self
        # A group that begins before the columns is divided; each part has its scale.
        size, per = math.gcd(start, self.group_size), 1 if self.table is None else 2
        if problem := self._why_whole(start, size):
            raise CutGroupError(
                f"cannot be cut: columns {start} to {start + length} of its {self.columns}: "
                f"{problem}; use a tensor_parallel_size that leaves groups whole"
            )
        parts = torch.arange(start, start + length, size, device=self.device) // self.group_size
        found = replace(
            self,
            codes=self.codes.narrow(1, start // per, -(-length // per)),
            scales=self.scales[:, parts],
            zeros=None if self.zeros is None else self.zeros[:, parts],
            columns=length,
            group_size=size,
        )
        if self.can_be_panels() and not found.can_be_panels():
            raise CutGroupError(
                f"cannot be cut: columns {start} to {start + length} of its {self.columns} divide "
                f"groups of {self.group_size} into parts of {size}, which are too small; use a "
                "tensor_parallel_size that leaves groups whole"
            )
        return found

    def _why_whole(self, start: int, size: int) -> str:
        """Return why columns from ``start`` on cannot be had alone; empty: they can."""
        if self.order is not None:
            return "its groups are out of order"
        if self.table is not None and start % 2:
            return "two codes are one byte"
        rule = self.activations
        if rule is None or rule.has_scale:
            return ""
        if rule.group_size is None:
            return "its inputs are rounded by whole rows (activation_quantization)"
        return "its inputs are rounded in groups" if size % rule.group_size else ""

    @property
    def description(self) -> str:
        """The storage in words, for messages."""
        codes = f"{self.codes.dtype}" if self.table is None else "4-bit"
        scales = f"{self.scales.dtype} scales of {self.group_size} columns"
        others = [name for name in self._by_row if name not in ("codes", "scales")]
        return f"{codes} codes with {', '.join([scales, *others])}"

    def is_stored_like(self, other: PackedWeight) -> bool:
        """Return whether rows of ``other`` have the same tensors, dtypes and widths."""
        return (
            self.codes.dtype is other.codes.dtype
            and self.scales.dtype is other.scales.dtype
            and (self.columns, self.group_size) == (other.columns, other.group_size)
            and (self.table is None) is (other.table is None)
            and self._by_row.keys() == other._by_row.keys()
        )

    def fits(self, other: PackedWeight) -> bool:
        """Return whether the rows of ``other`` may follow these in one weight."""
        return (
            self.is_stored_like(other)
            and self.table == other.table
            and self.activations == other.activations
            and _same(self.order, other.order)
        )

    def above(self, *others: PackedWeight) -> PackedWeight:
        """Put the rows of ``others``, which fit, below these rows."""
        if not others:
            return self
        all_rows = [each._by_row for each in (self, *others)]
        joined = {name: _cat_bytes([each[name] for each in all_rows]) for name in all_rows[0]}
        return replace(self, **cast(Any, joined))

    def make_panels(self) -> PackedPanels:
        """Copy it into panels."""
        assert self.can_be_panels()
        factors = self.factors
        return PackedPanels(
            codes=self._panels_of_codes(),
            table=None if self.table is None else torch.tensor(self.table, device=self.device),
            scales=_panels_of_groups(self.scales),
            factors=None if factors is None else _panels_of_groups(factors[:, None]).squeeze(1),
            zeros=None if self.zeros is None else _panels_of_groups(self.zeros),
        )

    def _panels_of_codes(self) -> torch.Tensor:
        rows, width = self.codes.shape
        per = 2 if self.table is None else 4  # bytes per chunk
        by_row = self.codes.contiguous().view(torch.uint8)
        if self.table is not None:
            by_row = _even_terms_first(functional.pad(by_row, (0, -width % per))).view(torch.uint8)
        shape = (-(-rows // PANEL_COLUMNS), -(-width // per), PANEL_COLUMNS, per)
        panels = empty_in_large_pages(shape, torch.uint8, self.device)
        write_panels(by_row, panels)
        return panels.view(self.codes.dtype)

    @property
    def _by_row(self) -> dict[str, torch.Tensor]:
        """Its tensors that have a first dimension of rows."""
        given = {"zeros": self.zeros, "factors": self.factors}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        return {"codes": self.codes, "scales": self.scales, **there}

    def _with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        changed = {name: change(tensor) for name, tensor in self._by_row.items()}
        return replace(self, **cast(Any, changed))


@dataclass(frozen=True)
class PackedExperts:
    """A packed weight [m, n] for each expert of a mixture."""

    weights: tuple[PackedWeight, ...]
    inputs_first: bool = False
    """True if the float checkpoint has [experts, n, m], as for GPT-OSS; else [experts, m, n]."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.weights), *self.weights[0].shape))

    @property
    def activations(self) -> ServedActivations | None:
        return self.weights[0].activations

    def can_be_panels(self) -> bool:
        """Tell whether :func:`packed_linear` takes them."""
        return all(weight.can_be_panels() for weight in self.weights)

    def with_activations(self, rule: ServedActivations) -> PackedExperts:
        return replace(self, weights=tuple(each.with_activations(rule) for each in self.weights))

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a float checkpoint has."""
        weights = [weight.dequantise(dtype) for weight in self.weights]
        return torch.stack([weight.t() if self.inputs_first else weight for weight in weights])


def weight_of_packed_panels(
    panels: PackedPanels, group_size: int, shape: tuple[int, int]
) -> PackedWeight:
    """Return the weight of that shape from its panels, without its order."""
    rows = torch.arange(shape[0], device=panels.codes.device)
    return rows_of_packed_panels(panels, group_size, shape[1], rows)


def rows_of_packed_panels(
    panels: PackedPanels, group_size: int, columns: int, rows: torch.Tensor
) -> PackedWeight:
    """Copy rows ``rows``, int64, of a weight with so many columns out of its panels."""
    block, column = rows // PANEL_COLUMNS, rows % PANEL_COLUMNS
    width = columns if panels.table is None else -(-columns // 2)
    codes = panels.codes.view(torch.uint8)[block, :, column].flatten(1)  # bytes
    if panels.table is not None:
        codes = _in_order(codes)
    factors, zeros = panels.factors, panels.zeros
    return PackedWeight(
        codes=codes[:, :width].contiguous().view(panels.codes.dtype),
        scales=_plain_bytes(panels.scales)[block, :, column].view(panels.scales.dtype),
        columns=columns,
        group_size=group_size,
        table=None if panels.table is None else tuple(panels.table.tolist()),
        zeros=None if zeros is None else zeros[block, :, column],
        factors=None if factors is None else factors[block, column],
    )


def _even_terms_first(codes: torch.Tensor) -> torch.Tensor:
    """Reorder uint8 [..., n], eight codes in four bytes, to int32 [..., n / 4] with the codes of
    even terms in the low half."""
    return _swap(_swap(codes.view(torch.int32), 0x00F000F0, 4), 0x0000FF00, 8)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Put uint8 [..., n], whose even terms come first, back in order."""
    words = _swap(_swap(codes.view(torch.int32), 0x0000FF00, 8), 0x00F000F0, 4)
    return words.view(torch.uint8)


def _swap(words: torch.Tensor, mask: int, distance: int) -> torch.Tensor:
    """Swap the bits of a mask with those ``distance`` above them."""
    moved = (words >> distance).bitwise_xor_(words).bitwise_and_(mask)
    return (moved << distance).bitwise_xor_(moved).bitwise_xor_(words)


def _panels_of_groups(by_row: torch.Tensor) -> torch.Tensor:
    """[m, groups] -> [m / 64, groups, 64]."""
    padded = functional.pad(_plain_bytes(by_row), (0, 0, 0, -len(by_row) % PANEL_COLUMNS))
    panels = padded.reshape(-1, PANEL_COLUMNS, by_row.shape[1]).transpose(1, 2).contiguous()
    return panels.view(by_row.dtype)


def _plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers of 8 bits as uint8, for which torch has more operations."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _cat_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of any dtype along their rows."""
    return torch.cat([_plain_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
