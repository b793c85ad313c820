"""Transport of captured rows from a device: they are checked there and copied to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from vllm.ops.rows import find_bad_cells, first_bad_cells, gather_rows
from vllm.utils.transfers import HostCopy

MAX_LEAVING_TOKENS = 16384
"""Tokens of one large step; its rows leave while the next one runs."""
MAX_LEAVING_BYTES = 2**30


class RowReport(NamedTuple):
    """The result of a check of rows: the first bad (row, column) of each kind, -1 for none."""

    nonfinite_row: int
    nonfinite_column: int
    zero_row: int
    zero_column: int

    @property
    def is_good(self) -> bool:
        """True if there is no bad row of either kind."""
        return self.nonfinite_row < 0 and self.zero_row < 0

    def result(self) -> RowReport:
        """Return itself: a finished report is a :class:`PendingReport` too."""
        return self


class PendingReport(Protocol):
    """A report that may still be on its way from the device, like the rows that it describes."""

    def result(self) -> RowReport:
        """Wait until rows and report are on the host; any thread may call it."""
        ...


class RowTransport(Protocol):
    """Moves rows from a device to the host."""

    def gather(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> PendingReport:
        """Copy rows to ``out``, on the host (pinned for another device), and check them.

        ``out`` may be read once the report is there; the row cache may be written at once.
        """
        ...

    def inspect(self, rows: torch.Tensor) -> PendingReport:
        """Check dense rows [rows, layers, hidden] where they are."""
        ...

    def beside(self, rows: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
        """Return a maker of ``with`` blocks, for any thread, whose work on ``rows`` delays nothing.

        The caller keeps ``rows``, and does not write them, until it knows that the work is done.
        """
        ...

    def leaving_bytes(self, token_bytes: int) -> int:
        """Most device memory that rows take between :meth:`gather` and the host.

        token_bytes: bytes of the rows of one token.
        """
        ...


class HostRows:
    """The :class:`RowTransport` of the CPU, whose rows are already on the host."""

    def gather(self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> RowReport:
        report = torch.empty(2, dtype=torch.int64)
        gather_rows(row_cache, slots, out, report)
        return _report(report, out.shape[1])

    def inspect(self, rows: torch.Tensor) -> RowReport:
        return _report(first_bad_cells(rows), rows.shape[1])

    def beside(self, rows: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext

    def leaving_bytes(self, token_bytes: int) -> int:
        return 0


def _report(cells: torch.Tensor, num_columns: int) -> RowReport:
    places: list[int] = []
    for cell in cells.tolist():
        places += divmod(cell, num_columns) if cell >= 0 else (-1, -1)
    return RowReport(*places)


class DeviceReport(NamedTuple):
    """A :class:`PendingReport` of rows on a device."""

    cells: HostCopy
    """int64 [2]: first cell that is not finite, first that is all zeros; ``num_cells``: none."""
    num_cells: int
    num_columns: int

    def result(self) -> RowReport:
        """Wait for the report, and for earlier copies of its stream."""
        cells = self.cells.result()
        return _report(cells.masked_fill(cells == self.num_cells, -1), self.num_columns)


class DeviceRows:
    """The :class:`RowTransport` of one device, on its own stream.

    Rows are checked and copied beside the computation, which never waits for them.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: WeakKeyDictionary[HostCopy, torch.Tensor] = WeakKeyDictionary()
        """Gathered rows, oldest first, by the last copy that reads them; an entry lasts as long as
        someone holds that copy to wait for it."""
        self._changing = threading.Lock()

    def gather(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> DeviceReport:
        """Take the rows out of the pool on the current stream, so that later work on it may write
        the pool. Checking and copying them then runs beside that stream.
        """
        with self._changing:
            self._make_room(out.nbytes, self.leaving_bytes(out[:1].nbytes))
            rows_per_block = row_cache.shape[1]
            rows = row_cache[slots // rows_per_block, slots % rows_per_block]
            with self.beside(rows)():
                out.copy_(rows, non_blocking=True)
                report = self.inspect(rows)
            self._leaving[report.cells] = rows
            return report

    def inspect(self, rows: torch.Tensor) -> DeviceReport:
        cells = torch.empty(2, dtype=torch.int64, device=rows.device)
        find_bad_cells(rows, cells)
        return DeviceReport(HostCopy(cells), rows.shape[0] * rows.shape[1], rows.shape[1])

    def leaving_bytes(self, token_bytes: int) -> int:
        return min(MAX_LEAVING_TOKENS * token_bytes, MAX_LEAVING_BYTES)

    def _make_room(self, num_bytes: int, most_bytes: int) -> None:
        """Drop the oldest rows until at most ``most_bytes`` would be held.

        The device waits until they have left, the host does not: work that is queued from now on
        may use their memory.
        """
        leaving = list(self._leaving.items())
        num_bytes += sum(rows.nbytes for _, rows in leaving)
        for last_copy, rows in leaving:
            if num_bytes <= most_bytes:
                return
            last_copy.wait_on_device()
            del self._leaving[last_copy]
            num_bytes -= rows.nbytes

    def beside(self, rows: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
        if self._stream is None:
            # Its kernels are small, and would otherwise wait behind whole products.
            self._stream = torch.cuda.Stream(rows.device, priority=-1)  # type: ignore[no-untyped-call]
        stream, rows_ready = self._stream, torch.cuda.Event()  # type: ignore[no-untyped-call]
        rows_ready.record(torch.cuda.current_stream(rows.device))

        @contextmanager
        def block() -> Iterator[None]:
            stream.wait_event(rows_ready)
            with torch.cuda.stream(stream):
                yield

        return block


def make_row_transport(device: torch.device) -> RowTransport:
    """The transport of one engine on that device."""
    return HostRows() if device.type == "cpu" else DeviceRows()
