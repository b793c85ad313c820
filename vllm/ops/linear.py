"""Products with the weights of linear layers, and the layout of these weights in memory.

A weight [m, n] lies in rows, or in *panels* [m / 64, n, 64, 1] (bfloat16: [m / 64, n / 2, 64, 2]),
rounded up and filled with zeros. In a panel the weights of 64 outputs lie side by side, term by
term (bfloat16: by pairs of terms), in the order in which the CPU's products read them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import torch
from torch.nn import functional

from vllm.ops.operation import Written, operation, source_of
from vllm.utils.host_memory import empty_in_large_pages

PANEL_COLUMNS = 64
"""kColumns of csrc/cpu/linear.cpp."""

_ROWS_AT_ONCE = 64
"""Rows of each product in plain torch."""

_PARTS = (1, 4, 8, 16, 64)
"""Numbers of parts that a product may be split into, the fastest first."""


@operation
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: Written) -> None:
    """``x @ weight.T + bias``, summed in float32 and rounded once.

    x: [rows, n], strided; weight: [m, n] or its panels; bias: [m]; out: [rows, m], strided.
    On the CPU a row has the same bits for any number of rows.
    """
    if weight.dim() == 4:
        # In rows, because a library's order of sums depends on the layout.
        weight = weight_of_panels(weight, out.shape[1], x.shape[1]).contiguous()
    if x.device.type != "cpu":
        out.copy_(functional.linear(x, weight, bias))
        return
    # A library's order of sums depends on the number of rows, so it is always the same here.
    parts = _parts_of_a_product(x.shape[1], out.shape[1])
    for start in range(0, x.shape[0], _ROWS_AT_ONCE):
        rows = x[start : start + _ROWS_AT_ONCE]
        padded = functional.pad(rows, (0, 0, 0, _ROWS_AT_ONCE - len(rows)))
        product = _multiply(padded.float(), weight.float(), parts)[: len(rows)]
        out[start : start + len(rows)] = product if bias is None else product + bias.float()


@linear.contract
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    rows, terms = x.shape
    assert x.dtype is weight.dtype is out.dtype and out.shape[0] == rows
    assert weight.shape == (
        (out.shape[1], terms)
        if weight.dim() == 2
        else panels_shape(out.shape[1], terms, weight.dtype)
    )
    assert weight.is_contiguous() or (weight.dim() == 2 and weight.stride(1) == 1)
    assert (x.stride(1) == 1 or terms <= 1) and (out.stride(1) == 1 or out.shape[1] <= 1)
    assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())


def _multiply(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """``x @ weight.T`` as ``parts`` products of equally many rows; 0: term by term, no library."""
    if parts == 1:
        return functional.linear(x, weight)
    if parts > 1:
        by_part = weight.t().expand(parts, *reversed(weight.shape))
        return torch.bmm(x.reshape(parts, -1, x.shape[1]), by_part).flatten(0, 1)
    sums = x.new_zeros(len(x), len(weight))
    for term in range(x.shape[1]):  # product and sum are rounded separately
        sums += x[:, term, None] * weight[:, term]
    return sums


@functools.cache
def _parts_of_a_product(terms: int, columns: int) -> int:
    """Number of parts with which torch gives equal rows equal bits, for any number of threads.

    It is found by trial on this machine: the CPU decides which rows a library treats differently
    (those behind the last whole block of its kernel), and whether threads share terms.
    """
    generator = torch.Generator().manual_seed(terms)
    row, weight = (torch.randn(n, terms, generator=generator) for n in (1, columns))
    x = row.repeat(_ROWS_AT_ONCE, 1)
    for parts in _PARTS:
        made = [_multiply(x, weight, parts) for _ in _numbers_of_threads()]
        if all(torch.equal(rows, made[0][:1].expand_as(rows)) for rows in made):
            return parts
    return 0


def _numbers_of_threads() -> Iterator[int]:
    """Set torch's number of threads to several values in turn, and yield each."""
    given = torch.get_num_threads()
    try:
        for threads in sorted({1, 2, 3, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(given)


@operation
def linear_by_head(x: torch.Tensor, weight: torch.Tensor, out: Written) -> None:
    """``x[:, h] @ weight[h].T`` for every head h, each as in :func:`linear`.

    x: [rows, heads, n], strided; weight: [heads, m, n], dense, or the panels of each head; out:
    [rows, heads, m], strided.
    """
    if x.device.type != "cpu":
        out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
        return
    for head in range(x.shape[1]):
        linear(x[:, head], weight[head], None, out[:, head])


@linear_by_head.contract
def _(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    heads, terms, columns = x.shape[1], x.shape[2], out.shape[2]
    assert x.dtype is weight.dtype is out.dtype and out.shape[:2] == x.shape[:2]
    assert weight.is_contiguous() and weight.shape == (
        (heads, columns, terms)
        if weight.dim() == 3
        else (heads, *panels_shape(columns, terms, weight.dtype))
    )
    assert (x.stride(2) == 1 or terms <= 1) and (out.stride(2) == 1 or columns <= 1)


@operation
def panel_embedding(
    token_ids: torch.Tensor, panels: torch.Tensor, num_embeddings: int, out: Written
) -> None:
    """Look up rows ``token_ids`` of the table [num_embeddings, n] in panels.

    token_ids: int64 [tokens]; out: [tokens, n], dense.
    """
    torch.index_select(
        weight_of_panels(panels, num_embeddings, out.shape[1]), 0, token_ids, out=out
    )


@panel_embedding.contract
def _(
    token_ids: torch.Tensor, panels: torch.Tensor, num_embeddings: int, out: torch.Tensor
) -> None:
    assert token_ids.dtype is torch.int64 and token_ids.is_contiguous() and out.is_contiguous()
    assert panels.dtype is out.dtype and panels.is_contiguous()
    assert out.shape[0] == token_ids.shape[0]
    assert panels.shape == panels_shape(num_embeddings, out.shape[1], panels.dtype)


def prefers_panels(device: torch.device) -> bool:
    """Tell whether products on that device read weights in panels."""
    return source_of(device.type).reads_panels


def panels_shape(columns: int, terms: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape of the panels of a weight [columns, terms]."""
    pairs = 2 if dtype is torch.bfloat16 else 1
    return (-(-columns // PANEL_COLUMNS), -(-terms // pairs), PANEL_COLUMNS, pairs)


def empty_panels(weight: torch.Tensor) -> torch.Tensor:
    """Allocate panels for each weight [m, n] of ``weight`` [..., m, n]: [..., m / 64, ...]."""
    *numbers, rows, terms = weight.shape
    shape = (*numbers, *panels_shape(rows, terms, weight.dtype))
    return empty_in_large_pages(shape, weight.dtype, weight.device)


def make_panels(weight: torch.Tensor) -> torch.Tensor:
    """Copy each weight [m, n] of ``weight`` [..., m, n] into panels: [..., m / 64, ...]."""
    panels = empty_panels(weight)
    if weight.dim() == 2:
        panels_into(panels, weight)
    else:
        for made, given in zip(panels.flatten(0, -5), weight.flatten(0, -3), strict=True):
            panels_into(made, given)
    return panels


def panels_into(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Write ``weight`` [m, n], of any dtype, to its panels, in theirs."""
    rows, dense = weight.to(panels.dtype), torch.contiguous_format
    # contiguous() would keep the strides of a transposed row.
    rows = rows if rows.stride(1) == 1 else rows.clone(memory_format=dense)
    by_byte = panels.view(torch.uint8)
    write_panels(rows.view(torch.uint8), by_byte.view(*panels.shape[:3], -1))


def rows_into_panels(panels: torch.Tensor, first: int, rows: torch.Tensor, num_rows: int) -> None:
    """Overwrite rows from ``first`` on of a weight [num_rows, n] in panels; others stay."""
    end = first + len(rows)
    start, last = first // PANEL_COLUMNS, -(-end // PANEL_COLUMNS)
    reached = panels[start:last]
    if first % PANEL_COLUMNS or (end % PANEL_COLUMNS and end < num_rows):
        stop = min(last * PANEL_COLUMNS, num_rows)
        beside = rows_of_panels(panels, start * PANEL_COLUMNS, stop, rows.shape[1])
        beside[first % PANEL_COLUMNS :][: len(rows)] = rows
        rows = beside
    panels_into(reached, rows)


def rows_of_panels(panels: torch.Tensor, first: int, end: int, terms: int) -> torch.Tensor:
    """Copy rows ``first`` to ``end - 1`` out of a weight [m, terms] in panels."""
    start, last = first // PANEL_COLUMNS, -(-end // PANEL_COLUMNS)
    skipped = first - start * PANEL_COLUMNS
    held = weight_of_panels(panels[start:last], skipped + end - first, terms)
    return held[skipped:].clone()


@operation
def write_panels(weight: torch.Tensor, panels: Written) -> None:
    """Write the bytes of rows to panels of units of b bytes.

    weight: uint8 [m, bytes of a row], strided; panels: uint8 [m / 64, bytes of a row / b, 64, b],
    rounded up, b 2 or 4, dense; zeros follow the last row and the end of each row.
    """
    blocks, units, width, unit_bytes = panels.shape
    rows, row_bytes = weight.shape
    behind = (0, units * unit_bytes - row_bytes, 0, blocks * width - rows)
    whole = functional.pad(weight, behind).view(blocks, width, units, unit_bytes)
    # A unit is one number: torch copies few large numbers faster than many small ones.
    as_one = {2: torch.int16, 4: torch.int32}[unit_bytes]
    panels.view(as_one).copy_(whole.view(as_one).permute(0, 2, 1, 3))


@write_panels.contract
def _(weight: torch.Tensor, panels: torch.Tensor) -> None:
    blocks, units, width, unit_bytes = panels.shape
    assert weight.dtype is panels.dtype is torch.uint8 and weight.stride(1) == 1
    assert panels.is_contiguous() and width == PANEL_COLUMNS and unit_bytes in (2, 4)
    assert blocks == -(-weight.shape[0] // width) and units == -(-weight.shape[1] // unit_bytes)


def weight_of_panels(panels: torch.Tensor, columns: int, terms: int) -> torch.Tensor:
    """Return weights [..., columns, terms] in rows from their panels."""
    whole = panels.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return whole[..., :columns, :terms]
