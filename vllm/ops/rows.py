"""Captured rows: into a row cache, out of it, and whether they are sound. Copies of blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from vllm.ops.operation import Written, operation


@operation
def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    column: int,
    row_cache: Written,
) -> None:
    """Store ``hidden (+ residual)``, rounded to the dtype, as one column of the rows.

    hidden, residual: [tokens, hidden]; slots: int64 [tokens], ``block * rows_per_block + row``,
    -1 to skip; row_cache: strided view [blocks, rows_per_block, layers, hidden].
    """
    rows_per_block = row_cache.shape[1]
    stream = hidden if residual is None else hidden + residual
    written = (slots >= 0).nonzero().squeeze(1)
    slots = slots[written]
    cells = row_cache[:, :, column]
    cells[slots // rows_per_block, slots % rows_per_block] = stream[written].to(row_cache.dtype)


@capture_rows.contract
def _(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    column: int,
    row_cache: torch.Tensor,
) -> None:
    assert slots.dtype is torch.int64 and slots.is_contiguous()
    assert hidden.shape == (slots.shape[0], row_cache.shape[3]) and hidden.stride(1) == 1
    assert hidden.dtype is row_cache.dtype and row_cache.stride(3) == 1
    assert residual is None or residual.shape == hidden.shape
    assert residual is None or (residual.dtype is hidden.dtype and residual.stride(1) == 1)


@operation
def gather_rows(
    row_cache: torch.Tensor, slots: torch.Tensor, out: Written, report: Written
) -> None:
    """Copy rows out of a row cache on the host, and look at every element once.

    row_cache, slots: as for :func:`capture_rows`, no slot skipped; out: [rows, layers, hidden],
    dense; report: int64 [2], the first cells (row * layers + layer) that hold a value that is
    not finite and that are all zero; -1: none.
    """
    rows_per_block = row_cache.shape[1]
    out.copy_(row_cache[slots // rows_per_block, slots % rows_per_block])
    report.copy_(_first_bad_cells(out))


@gather_rows.contract
def _(
    row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, report: torch.Tensor
) -> None:
    assert slots.dtype is torch.int64 and slots.is_contiguous() and out.is_contiguous()
    assert out.dtype is row_cache.dtype and row_cache.stride(3) == 1
    assert out.shape == (slots.shape[0], *row_cache.shape[2:])
    assert report.dtype is torch.int64 and report.shape == (2,)


@operation
def copy_blocks(sources: torch.Tensor, destinations: torch.Tensor, pool: Written) -> None:
    """Copy whole blocks inside the pool; no destination is a source.

    sources, destinations: int64 [copies]; pool: int8 [num_blocks, block_bytes].
    """
    # In slices: the blocks in between stand outside the pool.
    per_slice = max(1, _COPY_SLICE_BYTES // pool.shape[1])
    for start in range(0, len(sources), per_slice):
        part = slice(start, start + per_slice)
        pool[destinations[part]] = pool[sources[part]]


@copy_blocks.contract
def _(sources: torch.Tensor, destinations: torch.Tensor, pool: torch.Tensor) -> None:
    assert sources.dtype is destinations.dtype is torch.int64 and pool.dtype is torch.int8
    assert sources.shape == destinations.shape and pool.is_contiguous()


_COPY_SLICE_BYTES = 64 * 2**20


class RowReport(NamedTuple):
    """What a look at rows found: the first bad (row, column) of each kind, -1 for none."""

    nonfinite_row: int
    nonfinite_column: int
    zero_row: int
    zero_column: int

    @property
    def is_good(self) -> bool:
        """Whether there is neither."""
        return self.nonfinite_row < 0 and self.zero_row < 0

    def result(self) -> RowReport:
        """A report that is there is a :class:`PendingReport` too."""
        return self


class PendingReport(Protocol):
    """A report that may still be on its way from the device, with the rows it is about."""

    def result(self) -> RowReport:
        """Wait until rows and report are on the host. May be called on any thread."""
        ...


class RowTransport(Protocol):
    """How rows leave a device."""

    def gather(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> PendingReport:
        """Copy rows to ``out``, on the host (pinned for another device), and look at them.

        ``out`` may be read when the report is there, the row cache may be written at once.
        """
        ...

    def inspect(self, rows: torch.Tensor) -> PendingReport:
        """The report on dense rows [rows, layers, hidden], where they are."""
        ...

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """What the block does with ``rows``, nothing that is queued after it waits for.

        Whoever calls it keeps ``rows``, and does not write them, until that is known to be over.
        """
        ...

    def leaving_bytes(self, token_bytes: int) -> int:
        """Most device memory that rows take between :meth:`gather` and the host.

        token_bytes: of the rows of one token.
        """
        ...


class HostRows:
    """The :class:`RowTransport` of the CPU: rows are there already."""

    def gather(self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> RowReport:
        report = torch.empty(2, dtype=torch.int64)
        gather_rows(row_cache, slots, out, report)
        return _report(report, out.shape[1])

    def inspect(self, rows: torch.Tensor) -> RowReport:
        return _report(_first_bad_cells(rows), rows.shape[1])

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def leaving_bytes(self, token_bytes: int) -> int:
        return 0


def make_row_transport(device: torch.device) -> RowTransport:
    """The transport of one engine on that device."""
    if device.type == "cpu":
        return HostRows()
    from vllm.ops.cuda.device_rows import DeviceRows

    return DeviceRows()


def _report(cells: torch.Tensor, num_columns: int) -> RowReport:
    places: list[int] = []
    for cell in cells.tolist():
        places += divmod(cell, num_columns) if cell >= 0 else (-1, -1)
    return RowReport(*places)


def _first_bad_cells(rows: torch.Tensor) -> torch.Tensor:
    """``report`` of :func:`gather_rows`."""
    bad = (~torch.isfinite(rows).all(dim=-1), (rows == 0).all(dim=-1))
    return torch.tensor([_first(found) for found in bad])


def _first(found: torch.Tensor) -> int:
    cells = found.flatten().nonzero()
    return int(cells[0]) if len(cells) else -1
