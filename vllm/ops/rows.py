"""Captured rows: writing them to a row cache, reading and checking them. Copies of blocks."""

from __future__ import annotations

import torch
from torch.nn import functional

from vllm.ops.operation import Written, operation
from vllm.v1.rows.fields.checks import largest_magnitudes


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
    """Copy rows out of a row cache on the host, and check every element once.

    row_cache, slots: as for :func:`capture_rows`, no slot skipped; out: [rows, layers, hidden],
    dense; report: int64 [2], the first cell (row * layers + layer) with a value that is not
    finite, and the first that is all zeros; -1: none.
    """
    rows_per_block = row_cache.shape[1]
    out.copy_(row_cache[slots // rows_per_block, slots % rows_per_block])
    report.copy_(first_bad_cells(out))


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
    # In slices, because the copies are staged in memory outside the pool.
    per_slice = max(1, _COPY_SLICE_BYTES // pool.shape[1])
    for start in range(0, len(sources), per_slice):
        part = slice(start, start + per_slice)
        pool[destinations[part]] = pool[sources[part]]


@copy_blocks.contract
def _(sources: torch.Tensor, destinations: torch.Tensor, pool: torch.Tensor) -> None:
    assert sources.dtype is destinations.dtype is torch.int64 and pool.dtype is torch.int8
    assert sources.shape == destinations.shape and pool.is_contiguous()


_COPY_SLICE_BYTES = 64 * 2**20


@operation
def find_bad_cells(rows: torch.Tensor, report: Written) -> None:
    """Find rows that cannot be right, where they are and without copying them.

    rows: [rows, layers, hidden]; report: int64 [2], the first cell (row * layers + layer) with a
    value that is not finite, and the first that is all zeros; rows * layers: none.
    """
    largest = largest_magnitudes(rows).flatten()
    good = torch.stack([largest.isfinite(), largest != 0])
    good = functional.pad(good, (0, 1))  # the cell after the last one means none
    num_cells = largest.shape[0]
    cells = torch.arange(num_cells + 1, device=rows.device)
    # Not torch.where: it copies a number to the device and waits for it.
    torch.amin(cells.expand_as(good).masked_fill(good, num_cells), dim=1, out=report)


@find_bad_cells.contract
def _(rows: torch.Tensor, report: torch.Tensor) -> None:
    assert rows.dim() == 3 and rows.stride(2) == 1
    assert report.dtype is torch.int64 and report.shape == (2,) and report.is_contiguous()


def first_bad_cells(rows: torch.Tensor) -> torch.Tensor:
    """The ``report`` of :func:`gather_rows` on these rows."""
    report = torch.empty(2, dtype=torch.int64)
    find_bad_cells(rows, report)
    return report.masked_fill_(report == rows.shape[0] * rows.shape[1], -1)
