"""Rows of a finished weight that stay codes of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from vllm.model_executor.layers.weight_share import Stored
from vllm.model_executor.utils import WeightFormatError
from vllm.ops.packed_linear import PackedWeight, packed_linear, rows_of_packed_panels


class Codes:
    """Codes of one form, in panels. dtype: of rows that are looked up."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._num_rows, self._terms = weight.shape
        self._group_size = weight.group_size
        self._order, self._activations = weight.order, weight.activations
        self._panels = weight.make_panels()

    @property
    def num_bytes(self) -> int:
        return sum(0 if tensor is None else tensor.nbytes for tensor in self._panels.flat)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that hold the codes. The table of their values is part of their form."""
        table = self._panels.table
        return [one for one in self._panels.flat if one is not None and one is not table]

    def multiply_into(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        x_scales, is_whole = None, False
        if self._activations is not None:
            x, x_scales = self._activations.quantise(x)
            is_whole = self._activations.dtype is torch.int8
        if self._order is not None:
            x = x.index_select(1, self._order)
        packed_linear(x, self._panels, self._group_size, x_scales, is_whole, bias, out)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return self._rows(rows).dequantise(self._dtype)

    def _rows(self, rows: torch.Tensor) -> PackedWeight:
        found = rows_of_packed_panels(self._panels, self._group_size, self._terms, rows)
        return replace(found, order=self._order, activations=self._activations)

    def _run(self, first: int, end: int) -> PackedWeight:
        return self._rows(torch.arange(first, end, device=self._panels.codes.device))

    def writes(self, stored: Stored, first: int) -> Iterator[Callable[[], None]]:
        """Yield what replaces rows from ``first`` on. WeightFormatError: nothing can."""
        held = self._run(0, 1)
        if not isinstance(stored, PackedWeight):
            raise WeightFormatError(f"{stored.dtype}", held.description)
        if not held.is_stored_like(stored):
            raise WeightFormatError(stored.description, held.description)
        if stored.shape[0] < self._num_rows and not held.fits(stored):
            raise WeightFormatError(
                f"{stored.description} with a table, an order of inputs or a rounding of them that "
                "the rows beside them do not have",
                held.description,
            )
        yield partial(self._write, stored, first)

    def _write(self, stored: PackedWeight, first: int) -> None:
        end = first + stored.shape[0]
        self._order, self._activations = stored.order, stored.activations
        whole = stored if end == self._num_rows else stored.above(self._run(end, self._num_rows))
        if first:
            whole = self._run(0, first).above(whole)
        for held, tensor in zip(self._panels.flat, whole.make_panels().flat, strict=True):
            if held is not None and tensor is not None:
                held.view(torch.uint8).copy_(tensor.view(torch.uint8))


def joined_codes(codes: Mapping[int, PackedWeight]) -> dict[int, PackedWeight]:
    """Join adjacent codes of one form; keys are their first rows."""
    runs: dict[int, list[PackedWeight]] = {}
    start = end = -1
    for row in sorted(codes):
        if row == end and runs[start][0].fits(codes[row]):
            runs[start].append(codes[row])
        else:
            start, runs[row] = row, [codes[row]]
        end = row + codes[row].shape[0]
    return {row: weights[0].above(*weights[1:]) for row, weights in runs.items()}
