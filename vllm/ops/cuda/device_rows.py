"""Rows from a device to the host, beside the computation: looked at there, copied on a stream
of their own, never waited for by the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from vllm.ops.rows import RowReport
from vllm.utils.row_checks import largest_magnitudes
from vllm.utils.transfers import HostCopy

MAX_LEAVING_TOKENS = 16384
"""Tokens of one large step: its rows leave while the next one runs."""
MAX_LEAVING_BYTES = 2**30


class DeviceReport(NamedTuple):
    """A :class:`vllm.ops.rows.PendingReport` of rows on a device."""

    cells: HostCopy
    """int64 [2]: first cell that is not finite, first that is all zero; ``num_cells``: none."""
    num_cells: int
    num_columns: int

    def result(self) -> RowReport:
        """Wait for it, and for what its stream copied before."""
        places: list[int] = []
        for cell in self.cells.result().tolist():
            places += divmod(cell, self.num_columns) if cell < self.num_cells else (-1, -1)
        return RowReport(*places)


def first_bad_cells(rows: torch.Tensor) -> torch.Tensor:
    """``DeviceReport.cells`` of rows [rows, layers, hidden], on their device."""
    largest = largest_magnitudes(rows).flatten()
    good = torch.stack([largest.isfinite(), largest != 0])
    good = functional.pad(good, (0, 1))  # the cell behind the last stands for none
    num_cells = largest.shape[0]
    cells = torch.arange(num_cells + 1, device=rows.device)
    # Not torch.where: it copies a number to the device and waits for it.
    return cells.expand_as(good).masked_fill(good, num_cells).amin(dim=1)


class DeviceRows:
    """The :class:`vllm.ops.rows.RowTransport` of one device, on a stream of its own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: WeakKeyDictionary[HostCopy, torch.Tensor] = WeakKeyDictionary()
        """Gathered rows, oldest first, by the last copy that reads them: they stay with whoever
        waits for it."""
        self._changing = threading.Lock()

    def gather(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> DeviceReport:
        """The rows leave the pool on the current stream, so that it may be written by what is
        queued next; from there they are looked at and travel beside it.
        """
        with self._changing:
            self._make_room(out.nbytes, self.leaving_bytes(out[:1].nbytes))
            rows_per_block = row_cache.shape[1]
            rows = row_cache[slots // rows_per_block, slots % rows_per_block]
            with self.beside(rows):
                out.copy_(rows, non_blocking=True)
                report = self.inspect(rows)
            self._leaving[report.cells] = rows
            return report

    def inspect(self, rows: torch.Tensor) -> DeviceReport:
        return DeviceReport(
            HostCopy(first_bad_cells(rows)), rows.shape[0] * rows.shape[1], rows.shape[1]
        )

    def leaving_bytes(self, token_bytes: int) -> int:
        return min(MAX_LEAVING_TOKENS * token_bytes, MAX_LEAVING_BYTES)

    def _make_room(self, num_bytes: int, most_bytes: int) -> None:
        """Let go of the oldest rows where there would be more than ``most_bytes``.

        The device waits until they have left, the host does not: what is queued from here on may
        use their memory.
        """
        leaving = list(self._leaving.items())
        num_bytes += sum(rows.nbytes for _, rows in leaving)
        for last_copy, rows in leaving:
            if num_bytes <= most_bytes:
                return
            last_copy.wait_on_device()
            del self._leaving[last_copy]
            num_bytes -= rows.nbytes

    @contextmanager
    def beside(self, rows: torch.Tensor) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            yield
