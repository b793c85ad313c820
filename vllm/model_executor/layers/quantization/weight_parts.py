"""A linear layer's weight in parts, each in a form of its own: rows below rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from vllm.model_executor.layers.layer import Layer
from vllm.ops.linear import linear, make_panels
from vllm.ops.packed_linear import PackedWeight, packed_linear, rows_of_packed_panels


class DensePart(Layer):
    """Rows ``start .. start + m - 1`` as floats [m, n], or their panels."""

    def __init__(self, start: int, weight: torch.Tensor) -> None:
        super().__init__()
        self.rows = slice(start, start + len(weight))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def pack_weight(self) -> None:
        self.weight = nn.Parameter(make_panels(self.weight.data), requires_grad=False)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write these columns of ``out`` [tokens, all rows]."""
        added = None if bias is None else bias[self.rows]
        linear(x, self.weight, added, out[:, self.rows])


class PackedPart(Layer):
    """Rows ``start .. start + m - 1``, packed, as panels."""

    def __init__(self, start: int, weight: PackedWeight) -> None:
        super().__init__()
        self.rows = slice(start, start + weight.shape[0])
        self.columns = weight.columns
        self.group_size = weight.group_size
        self.panels = weight.make_panels()
        for name in ("codes", "scales", "factors", "zeros"):
            tensor = getattr(self.panels, name)
            held = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, held)
        self.order = weight.order
        self.activations = weight.activations

    def pack_weight(self) -> None:
        """It lies so already."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write these columns of ``out`` [tokens, all rows]."""
        added = None if bias is None else bias[self.rows]
        x_scales, is_whole = None, False
        if self.activations is not None:
            x, x_scales = self.activations.quantise(x)
            is_whole = self.activations.dtype is torch.int8
        if self.order is not None:
            x = x.index_select(1, self.order)
        packed_linear(x, self.panels, self.group_size, x_scales, is_whole, added, out[:, self.rows])

    def look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Those rows, dequantised."""
        found = rows_of_packed_panels(self.panels, self.group_size, self.columns, rows)
        return found.dequantise(dtype)


class WeightParts(Layer):
    """All parts of a weight."""

    def __init__(self, weight: torch.Tensor, packed: Mapping[int, PackedWeight]) -> None:
        """The rows of ``packed``, by their first one, the others of ``weight``."""
        super().__init__()
        self._parts = tuple(_make_parts(weight, packed))
        for number, part in enumerate(self._parts):
            self.add_module(str(number), part)

    def pack_weight(self) -> None:
        """Reorder what is dense for speed."""
        for part in self._parts:
            part.pack_weight()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """``x @ weight.T + bias`` [tokens, all rows]."""
        for part in self._parts:
            part.multiply(x, bias, out)


def _make_parts(
    weight: torch.Tensor, packed: Mapping[int, PackedWeight]
) -> Iterator[DensePart | PackedPart]:
    """Packed rows of one form become one part."""
    joined: PackedWeight | None = None
    start = end = 0  # of what is joined
    for row in sorted(packed):
        piece = packed[row]
        if joined is not None and row == end and joined.fits(piece):
            joined = joined.above(piece)
            end += piece.shape[0]
            continue
        if joined is not None:
            yield PackedPart(start, joined)
        if row > end:
            yield DensePart(end, weight[end:row].clone())
        joined, start, end = piece, row, row + piece.shape[0]
    if joined is not None:
        yield PackedPart(start, joined)
    if end < len(weight):
        yield DensePart(end, weight[end:].clone())
