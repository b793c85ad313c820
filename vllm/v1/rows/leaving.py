"""Rows from a row cache to the host: copied, looked at and cast beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm.exceptions import Failure, FailureError
from vllm.hidden_states.fp8 import (
    DEVICE_VALUES_AT_ONCE,
    FP8,
    dequantize_rows,
    quantization_errors,
    quantize_rows,
    rows_at_once,
)
from vllm.ops.row_transport import PendingReport, RowTransport
from vllm.utils.expert_trace import ExpertChoices, ExpertLayout, find_bad_choice
from vllm.utils.row_checks import find_bad_row
from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.outputs import ExtractedRows

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"

LARGEST_PIECE_BYTES = DEVICE_VALUES_AT_ONCE * torch.float32.itemsize
"""Most memory on the host that one copy of rows from a device goes to, pinned."""


class BadRowsError(FailureError):
    """Rows that nobody may get: the message says which."""


@dataclass(frozen=True)
class RowForm:
    """How rows are kept on the host; fp8 has a scale for each row and layer."""

    dtype: torch.dtype

    def empty(self, shape: tuple[int, int, int], *, pinned: bool = False) -> ExtractedRows:
        """Room for rows [rows, layers, hidden], not initialised."""
        rows = ExtractedRows(torch.empty(shape, dtype=self.dtype, pin_memory=pinned))
        if self.dtype is FP8:
            rows.scales = torch.empty(shape[:2])
            rows.fp8_errors = torch.empty(shape[:2])
        return rows

    def cast(self, cells: torch.Tensor) -> list[torch.Tensor]:
        """Cells [cells, 1, hidden] of any dtype in this form, in the order of ``parts_of``."""
        if self.dtype is not FP8:
            return [cells.to(self.dtype)]
        values, scales = quantize_rows(cells)
        return [values, scales, quantization_errors(cells, values, scales)]


def parts_of(rows: ExtractedRows) -> list[torch.Tensor]:
    """The tensors of some rows: values, and of fp8 scales and errors."""
    return [x for x in (rows.hidden_states, rows.scales, rows.fp8_errors) if x is not None]


def rows_slice(rows: ExtractedRows, place: slice) -> ExtractedRows:
    """Some of them, in the same memory."""
    return ExtractedRows(*(part[place] for part in parts_of(rows)))


def check_rows(
    rows: ExtractedRows, is_good: bool, layer_ids: Sequence[int], positions: Sequence[int]
) -> None:
    """BadRowsError when rows, which have arrived, cannot be right.

    is_good: what a look at them, and perhaps at others, found. Layer 0 may be zero (padding).
    """
    if is_good:
        return
    values = rows.hidden_states
    if rows.scales is not None:
        values = dequantize_rows(values, rows.scales)
    problem = find_bad_row(values, layer_ids, positions)
    if problem is None:
        return
    if values.dtype is torch.float16:
        problem = Failure(problem.kind, f"{problem} (as float16, which ends at 65,504)")
    raise BadRowsError(problem)


def check_choices(choices: ExpertChoices, layout: ExpertLayout, positions: Sequence[int]) -> None:
    """BadRowsError when choices of experts, of the tokens at ``positions``, cannot be right."""
    problem = find_bad_choice(choices, layout, positions)
    if problem is not None:
        raise BadRowsError(problem)


class _LeavingCells(NamedTuple):
    """As many rows, layer by layer, as are cast at a time."""

    first: int
    report: PendingReport
    copies: list[HostCopy]
    """Empty: they are in their place already."""

    def arrive(self, targets: Sequence[list[torch.Tensor]]) -> bool:
        """Wait for them and put them in place; whether a look found nothing bad."""
        is_good = self.report.result().is_good
        for copy, *same_part in zip(self.copies, *targets, strict=False):
            _put_in_place(copy.result().squeeze(1), self.first, same_part)
        return is_good


class LeavingRows(NamedTuple):
    """Rows between the row cache and ``outs``, which follow each other."""

    outs: Sequence[ExtractedRows]
    pieces: Iterator[_LeavingCells]
    """Each is queued when it is asked for."""
    source: torch.Tensor
    """Where they come from, which stays until they have arrived."""

    @torch.inference_mode()
    def arrive(self) -> bool:
        """Wait for them and put them in place; whether a look found nothing bad. Once only.

        Two pieces at most are on their way at a time, so that the memory they come in is that of
        the pieces before, however many there are.
        """
        is_good = True
        targets = [parts_of(out) for out in self.outs]
        piece = next(self.pieces, None)
        while piece is not None:
            following = next(self.pieces, None)  # which comes while this one is put in place
            is_good &= piece.arrive(targets)
            piece = following
        return is_good


def _put_in_place(cells: torch.Tensor, first: int, targets: Sequence[torch.Tensor]) -> None:
    """Cells ``first, first + 1, ...`` of consecutive targets [rows, layers, ...]."""
    start = 0
    for target in targets:
        there = target.flatten(0, 1)
        begin, end = max(first, start), min(first + len(cells), start + len(there))
        if begin < end:
            there[begin - start : end - start].copy_(cells[begin - first : end - first])
        start += len(there)


def send_rows(
    transport: RowTransport,
    row_cache: torch.Tensor,
    slots: Ints,
    form: RowForm,
    outs: Sequence[ExtractedRows],
) -> LeavingRows:
    """Start to bring the rows in ``slots`` to ``outs``, on the host, one after another.

    row_cache: [blocks, rows_per_block, layers, hidden]. Rows that are not cast travel at once
    where the device may write to their one place; others are cast there, 64 MiB at a time, by who
    waits for them, and put in place. What is queued does not depend on how many outs there are.
    """
    first = outs[0].hidden_states
    is_reachable = row_cache.device.type == "cpu" or first.is_pinned()
    if form.dtype is row_cache.dtype and is_reachable and len(outs) == 1:
        places = to_device(slots, row_cache.device)
        report = transport.gather(row_cache, places, first)
        return LeavingRows(outs, iter([_LeavingCells(0, report, [])]), row_cache)
    rows = _dense_rows(row_cache, slots)
    pieces = _cast_in_pieces(transport, transport.beside(rows), rows, form)
    return LeavingRows(outs, pieces, rows)


def _cast_in_pieces(
    transport: RowTransport,
    beside: Callable[[], AbstractContextManager[None]],
    rows: torch.Tensor,
    form: RowForm,
) -> Iterator[_LeavingCells]:
    cells = rows.flatten(0, 1)[:, None]  # [cells, 1, hidden]
    at_once = rows_at_once(cells.shape[1:], DEVICE_VALUES_AT_ONCE)
    for start in range(0, len(cells), at_once):
        part = cells[start : start + at_once]
        with beside():
            cast = form.cast(part)
            # What float16 cannot hold is infinite there; fp8 shows what was not finite in scales.
            report = transport.inspect(part if form.dtype is FP8 else cast[0])
            copies = [HostCopy(tensor) for tensor in cast]
        del part, cast  # nothing of it is needed while others wait for the piece
        yield _LeavingCells(start, report, copies)


def _dense_rows(row_cache: torch.Tensor, slots: Ints) -> torch.Tensor:
    """[rows, layers, hidden]; those that lie together are not copied."""
    rows_per_block = row_cache.shape[1]
    first, last = (int(slots[0]), int(slots[-1])) if len(slots) else (0, -1)
    together = last - first + 1 == len(slots) and first // rows_per_block == last // rows_per_block
    if together or not len(slots):
        start = first % rows_per_block
        return row_cache[first // rows_per_block, start : start + len(slots)]
    places = to_device(slots, row_cache.device)
    return row_cache[places // rows_per_block, places % rows_per_block]
