"""Norms, activations and stores into the pool, in Triton.

Every row has its own program, or its own place in one, so its bits do not depend on other rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import activations, attention, norms, rows

_TILE = 4096
"""Elements of a program for short rows."""


def _row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(rows of the last leading dimension, its stride, stride of the dimension before it)."""
    assert x.stride(-1) == 1 or x.shape[-1] <= 1, "the last dimension must be contiguous"
    if x.dim() == 2:
        return 1, 0, x.stride(0)
    assert x.dim() == 3, "two or three dimensions"
    return x.shape[1], x.stride(1), x.stride(0)


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 512))


@norms.add_rms_norm.override("cuda")
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    offset: float,
    out: torch.Tensor,
) -> None:
    _rms_norm(x, weight, epsilon, offset, out, residual=residual)


@norms.gated_rms_norm.override("cuda")
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    _rms_norm(x, weight, epsilon, 0.0, out, gate=gate)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    offset: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> None:
    width = x.shape[-1]
    num_rows = out.numel() // width
    if num_rows == 0:
        return
    inner, inner_stride, outer_stride = _row_strides(x)
    _, gate_inner, gate_outer = (0, 0, 0) if gate is None else _row_strides(gate)
    padded = triton.next_power_of_2(width)
    rows = max(1, min(_TILE // padded, 64))
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        *(x, weight, residual, gate, out, num_rows, inner_stride, outer_stride),
        0 if residual is None else residual.stride(0),
        *(gate_inner, gate_outer, epsilon, offset),
        inner_rows=inner,
        width=width,
        padded=padded,
        tile_rows=rows,
        round_first=offset == 0.0,
        num_warps=_warps(rows * padded),
    )


norms.rms_norm.override("cuda")(_rms_norm)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    residual,
    gate,
    out,
    num_rows,
    inner_stride,
    outer_stride,
    residual_stride,
    gate_inner_stride,
    gate_outer_stride,
    eps,
    offset,
    inner_rows: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    tile_rows: tl.constexpr,
    round_first: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, padded)[None, :]
    mask = (row < num_rows)[:, None] & (column < width)
    start = row // inner_rows * outer_stride + row % inner_rows * inner_stride
    rounded_type = out.dtype.element_ty
    values = tl.load(x + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        stream = residual + row[:, None] * residual_stride + column
        values += tl.load(stream, mask=mask, other=0.0).to(tl.float32)
        values = values.to(rounded_type).to(tl.float32)
    mean_square = tl.sum(values * values, 1) / width
    normalised = values * tl.rsqrt(mean_square + eps)[:, None]
    if residual is not None:  # after the reduction, because other threads read until then
        tl.store(stream, values.to(rounded_type), mask=mask)
    if weight is not None:
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        if round_first:
            normalised = normalised.to(rounded_type).to(tl.float32) * scale
        else:
            normalised = normalised * (scale + offset)
    if gate is not None:
        start = row // inner_rows * gate_outer_stride + row % inner_rows * gate_inner_stride
        opening = tl.load(gate + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        normalised = normalised.to(rounded_type).to(tl.float32)
        normalised = normalised * (opening / (1.0 + tl.exp(-opening)))
    tl.store(out + row[:, None] * width + column, normalised.to(rounded_type), mask=mask)


@activations.silu_and_mul.override("cuda")
def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    width = x.shape[1] // 2
    _gate(x[:, width:], x[:, :width], out, times_gate=1)


@activations.sigmoid_gate.override("cuda")
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    _gate(x, gate, out, times_gate=0)


def _gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, times_gate: int) -> None:
    """``x * sigmoid(gate) * gate ** times_gate`` by rows."""
    width = x.shape[-1]
    if x.numel() == 0:
        return
    inner, inner_stride, outer_stride = _row_strides(x)
    _, gate_inner, gate_outer = _row_strides(gate)
    block = min(1024, triton.next_power_of_2(width))
    _gate_kernel[(x.numel() // width, triton.cdiv(width, block))](
        *(x, gate, out, inner_stride, outer_stride, gate_inner, gate_outer),
        inner_rows=inner,
        width=width,
        tile=block,
        times_gate=times_gate,
        num_warps=_warps(block),
    )


@triton.jit
def _gate_kernel(
    x,
    gate,
    out,
    inner_stride,
    outer_stride,
    gate_inner_stride,
    gate_outer_stride,
    inner_rows: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    times_gate: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < width
    outer, inner = row // inner_rows, row % inner_rows
    values = tl.load(x + outer * outer_stride + inner * inner_stride + column, mask=mask, other=0.0)
    opening = tl.load(
        gate + outer * gate_outer_stride + inner * gate_inner_stride + column, mask=mask, other=0.0
    ).to(tl.float32)
    numerator = opening if times_gate else 1.0
    result = values.to(tl.float32) * (numerator / (1.0 + tl.exp(-opening)))
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=mask)


@attention.write_kv.override("cuda")
def write_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor
) -> None:
    num_tokens, num_heads, key_size = key.shape
    if num_tokens == 0:
        return
    value_size = value.shape[2]
    padded = triton.next_power_of_2(max(key_size, value_size))
    heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // padded))
    _write_kv_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        *(key, value, kv_cache, slots),
        *(*key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:4]),
        num_heads=num_heads,
        key_size=key_size,
        value_size=value_size,
        padded=padded,
        tile_heads=heads,
        pages_per_block=kv_cache.shape[1],
        page_tokens=kv_cache.shape[2],
        num_warps=4,
    )


@triton.jit
def _write_kv_kernel(
    key,
    value,
    kv_cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    page_stride,
    token_stride,
    head_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    padded: tl.constexpr,
    tile_heads: tl.constexpr,
    pages_per_block: tl.constexpr,
    page_tokens: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = (tl.program_id(1) * tile_heads + tl.arange(0, tile_heads))[:, None]
    column = tl.arange(0, padded)[None, :]
    key_mask = (head < num_heads) & (column < key_size)
    value_mask = (head < num_heads) & (column < value_size)
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=key_mask)
    values = tl.load(
        value + token * value_token_stride + head * value_head_stride + column, mask=value_mask
    )
    page = slot // page_tokens
    cell = page // pages_per_block * block_stride + page % pages_per_block * page_stride
    cell += slot % page_tokens * token_stride
    tl.store(kv_cache + cell + head * head_stride + column, keys, mask=key_mask)
    tl.store(kv_cache + cell + head * head_stride + key_size + column, values, mask=value_mask)


@rows.capture_rows.override("cuda")
def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    column: int,
    row_cache: torch.Tensor,
) -> None:
    num_tokens, width = hidden.shape
    if num_tokens == 0:
        return
    block = min(2048, triton.next_power_of_2(width))
    cells = row_cache[:, :, column]
    _capture_kernel[(num_tokens, triton.cdiv(width, block))](
        *(hidden, residual, cells, slots, hidden.stride(0)),
        *(0 if residual is None else residual.stride(0), *cells.stride()[:2]),
        width=width,
        tile=block,
        rows_per_block=row_cache.shape[1],
        num_warps=_warps(block),
    )


@triton.jit(do_not_specialize=["rows_per_block"])
def _capture_kernel(
    hidden,
    residual,
    cells,
    slots,
    hidden_stride,
    residual_stride,
    block_stride,
    row_stride,
    width: tl.constexpr,
    tile: tl.constexpr,
    rows_per_block,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < width
    stream = tl.load(hidden + token * hidden_stride + column, mask=mask)
    if residual is not None:
        second = tl.load(residual + token * residual_stride + column, mask=mask)
        stream = stream.to(tl.float32) + second.to(tl.float32)
    start = slot // rows_per_block * block_stride + slot % rows_per_block * row_stride
    tl.store(cells + start + column, stream.to(cells.dtype.element_ty), mask=mask)


@rows.find_bad_cells.override("cuda")
def find_bad_cells(rows: torch.Tensor, report: torch.Tensor) -> None:
    num_rows, num_layers, width = rows.shape
    report.fill_(num_rows * num_layers)
    if num_rows * num_layers == 0:
        return
    tile = min(4096, triton.next_power_of_2(max(1, width)))
    _bad_cells_kernel[(num_rows * num_layers,)](
        *(rows, report, num_layers, *rows.stride()[:2]),
        width=width,
        tile=tile,
        num_warps=_warps(tile),
    )


@triton.jit(do_not_specialize=["num_layers"])
def _bad_cells_kernel(
    rows, report, num_layers, row_stride, layer_stride, width: tl.constexpr, tile: tl.constexpr
):
    cell = tl.program_id(0).to(tl.int64)
    start = cell // num_layers * row_stride + cell % num_layers * layer_stride
    largest = tl.zeros([tile], tl.float32)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        values = tl.load(rows + start + column, mask=column < width, other=0.0).to(tl.float32)
        # NaN counts as infinite, because the maximum of NaN and a number is the number.
        magnitude = tl.where(values == values, tl.abs(values), float("inf"))
        largest = tl.maximum(largest, magnitude)
    peak = tl.max(largest, axis=0)
    if peak == float("inf"):
        tl.atomic_min(report, cell)
    if peak == 0.0:
        tl.atomic_min(report + 1, cell)


@rows.copy_blocks.override("cuda")
def copy_blocks(sources: torch.Tensor, destinations: torch.Tensor, pool: torch.Tensor) -> None:
    if sources.shape[0] == 0:
        return
    words = pool.view(torch.int32)
    block = min(4096, triton.next_power_of_2(words.shape[1]))
    _copy_kernel[(sources.shape[0], triton.cdiv(words.shape[1], block))](
        words, sources, destinations, words.stride(0), num_words=words.shape[1], tile=block
    )


@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_kernel(pool, sources, destinations, stride, num_words: tl.constexpr, tile: tl.constexpr):
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    destination = tl.load(destinations + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = word < num_words
    values = tl.load(pool + source * stride + word, mask=mask)
    tl.store(pool + destination * stride + word, values, mask=mask)
