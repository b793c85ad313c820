"""The parts of a finished weight that holds codes: rows below rows, each part in its own form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.nn import functional

from vllm.model_executor.layers.weight_share import Stored
from vllm.model_executor.utils import LOADABLE_DTYPES, WeightFormatError
from vllm.ops.linear import (
    linear,
    make_panels,
    panel_embedding,
    prefers_panels,
    rows_into_panels,
    rows_of_panels,
)
from vllm.ops.packed_linear import PackedWeight, packed_linear, rows_of_packed_panels


class Part(ABC):
    """Rows ``start`` to ``end - 1`` of a weight [num_rows, n]; its methods count from ``start``."""

    def __init__(self, start: int, end: int, num_rows: int) -> None:
        self.start, self.end = start, end
        self._columns = None if (start, end) == (0, num_rows) else slice(start, end)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the columns of these rows to ``out`` [tokens, num_rows]; bias: [num_rows]."""
        if self._columns is not None:
            out = out[:, self._columns]
            bias = None if bias is None else bias[self._columns]
        self._multiply(x, bias, out)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that the part takes."""

    @abstractmethod
    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """``x @ rows.T + bias``."""

    @abstractmethod
    def look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return some of its rows as floats."""

    @abstractmethod
    def check(self, stored: Stored, first: int) -> None:
        """WeightFormatError: ``stored`` cannot replace rows from ``first`` on."""

    @abstractmethod
    def write(self, stored: Stored, first: int) -> None:
        """Replace rows from ``first`` on."""


class FloatPart(Part):
    """Floats [end - start, n], or their panels."""

    def __init__(self, start: int, num_rows: int, rows: torch.Tensor) -> None:
        super().__init__(start, start + len(rows), num_rows)
        self._terms = rows.shape[1]
        self._weight = make_panels(rows) if prefers_panels(rows.device) else rows

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        linear(x, self._weight, bias, out)

    def look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows_at(self._weight, rows, self.end - self.start, self._terms)

    def check(self, stored: Stored, first: int) -> None:
        check_is_float(stored, self._weight.dtype)

    def write(self, stored: Stored, first: int) -> None:
        assert isinstance(stored, torch.Tensor)
        write_rows(self._weight, first, stored, self.end - self.start)


class CodePart(Part):
    """Codes of 8 or 4 bits, in panels."""

    def __init__(self, start: int, num_rows: int, weight: PackedWeight) -> None:
        super().__init__(start, start + weight.shape[0], num_rows)
        self._terms, self._group_size = weight.columns, weight.group_size
        self._order, self._activations = weight.order, weight.activations
        self._panels = weight.make_panels()

    @property
    def num_bytes(self) -> int:
        return sum(0 if tensor is None else tensor.nbytes for tensor in self._panels.flat)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        x_scales, is_whole = None, False
        if self._activations is not None:
            x, x_scales = self._activations.quantise(x)
            is_whole = self._activations.dtype is torch.int8
        if self._order is not None:
            x = x.index_select(1, self._order)
        packed_linear(x, self._panels, self._group_size, x_scales, is_whole, bias, out)

    def look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._rows(rows).dequantise(dtype)

    def _rows(self, rows: torch.Tensor) -> PackedWeight:
        found = rows_of_packed_panels(self._panels, self._group_size, self._terms, rows)
        return replace(found, order=self._order, activations=self._activations)

    def _run(self, first: int, end: int) -> PackedWeight:
        return self._rows(torch.arange(first, end, device=self._panels.codes.device))

    def check(self, stored: Stored, first: int) -> None:
        held = self._run(0, 1)
        if not isinstance(stored, PackedWeight):
            raise WeightFormatError(f"{stored.dtype}", held.description)
        if not held.is_stored_like(stored):
            raise WeightFormatError(stored.description, held.description)
        if stored.shape[0] < self.end - self.start and not held.fits(stored):
            raise WeightFormatError(
                f"{stored.description} with a table, an order of inputs or a rounding of them that "
                "the rows beside them do not have",
                held.description,
            )

    def write(self, stored: Stored, first: int) -> None:
        assert isinstance(stored, PackedWeight)
        end, num_rows = first + stored.shape[0], self.end - self.start
        self._order, self._activations = stored.order, stored.activations
        whole = stored if end == num_rows else stored.above(self._run(end, num_rows))
        if first:
            whole = self._run(0, first).above(whole)
        panels = whole.make_panels()
        for held, tensor in zip(self._panels.flat, panels.flat, strict=True):
            if held is not None and tensor is not None:
                held.view(torch.uint8).copy_(tensor.view(torch.uint8))


def make_parts(
    codes: Mapping[int, PackedWeight], num_rows: int, floats: Callable[[int, int], torch.Tensor]
) -> tuple[Part, ...]:
    """Parts of ``codes``, keyed by their first rows, and of ``floats(start, end)`` between them.

    Adjacent codes of one form become one part.
    """
    runs: list[tuple[int, list[PackedWeight]]] = []
    end = -1
    for row in sorted(codes):
        if row == end and runs[-1][1][0].fits(codes[row]):
            runs[-1][1].append(codes[row])
        else:
            runs.append((row, [codes[row]]))
        end = row + codes[row].shape[0]
    parts: list[Part] = []
    end = 0
    for start, weights in runs:
        if start > end:
            parts.append(FloatPart(end, num_rows, floats(end, start)))
        parts.append(CodePart(start, num_rows, weights[0].above(*weights[1:])))
        end = parts[-1].end
    if end < num_rows:
        parts.append(FloatPart(end, num_rows, floats(end, num_rows)))
    return tuple(parts)


def check_is_float(stored: Stored, dtype: torch.dtype) -> None:
    """WeightFormatError: ``stored`` cannot replace floats of that dtype."""
    if isinstance(stored, PackedWeight):
        raise WeightFormatError(stored.description, f"{dtype}")
    if stored.dtype not in LOADABLE_DTYPES:
        raise WeightFormatError(f"{stored.dtype}", f"{dtype}")


def rows_at(weight: torch.Tensor, rows: torch.Tensor, num_rows: int, terms: int) -> torch.Tensor:
    """Rows ``rows``, int64 [k], of floats [num_rows, terms] or of their panels: a new tensor."""
    if weight.dim() == 2:
        return functional.embedding(rows, weight)
    found = weight.new_empty((len(rows), terms))
    panel_embedding(rows.contiguous(), weight, num_rows, found)
    return found


def read_rows(weight: torch.Tensor, first: int, end: int, terms: int) -> torch.Tensor:
    """Copy rows [end - first, terms] out of floats or their panels."""
    if weight.dim() == 2:
        return weight[first:end].clone()
    return rows_of_panels(weight, first, end, terms)


def write_rows(weight: torch.Tensor, first: int, rows: torch.Tensor, num_rows: int) -> None:
    """Write rows from ``first`` on to floats [num_rows, n] or their panels."""
    if weight.dim() == 2:
        weight[first : first + len(rows)].copy_(rows)
    else:
        rows_into_panels(weight, first, rows, num_rows)
