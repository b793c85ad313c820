"""Paged attention in Triton: one kernel for prompts, chunks, decodes and mixtures of them.

A program takes a tile of query rows, in which each token has the heads that share a KV head, and
walks over the keys in tiles that start at absolute positions. Every ``SPLIT_KEYS`` keys the online
softmax starts afresh, and the parts are folded together in order: inside the program, or, if there
are too few programs for the device, by :func:`_combine_kernel` from partial results of several
programs. Both ways do the same operations, so the distribution of keys over programs changes no
bit. A row that does not see a tile is left exactly as it was.

On a card the bits of a row then depend only on the tensor-core instruction. On Hopper, tiles of
64 and of 128 rows use the same one (64 rows for each four warps).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm.ops import attention
from vllm.ops.cuda import cards
from vllm.ops.cuda.triton_attention_tiles import visit_tiles
from vllm.ops.layout import SequenceLayout

SPLIT_KEYS = 2048
"""Keys of one part: a multiple of every key tile, and the same for every batch."""
PROGRAMS_WANTED = 512
"""About four per multiprocessor of a large card; with fewer programs, parts run side by side."""
MAX_PARTIAL_BYTES = 256 * 2**20
"""Most memory that partial results may take."""

_LOG2_E = math.log2(math.e)


class _TileShape(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile_shape(dtype: torch.dtype, padded_head: int, rows_of_longest: int) -> _TileShape:
    """Sizes for Hopper; ``keys`` must not depend on the batch, because bits depend on it.

    On other cards, warps divide the keys of a tile of 64 rows but the rows of a tile of 128, so a
    softmax would be summed in another order; there only one of the two shapes is used.
    The sizes are chosen so that the inner loop spills no register and shared memory (227 KiB)
    suffices.
    """
    if dtype is torch.float32:  # no tensor cores
        if padded_head > 256:
            return _TileShape(16, 16 if cards.has_small_memory() else 32, num_warps=8, num_stages=1)
        return _TileShape(32, 32, num_warps=8, num_stages=1)
    if cards.has_small_memory():
        if padded_head > 256:
            return _TileShape(16, 16, num_warps=4, num_stages=1)
        return _TileShape(64, 64 if padded_head <= 128 else 32, num_warps=4, num_stages=1)
    if padded_head > 256:
        return _TileShape(64, 32, num_warps=8, num_stages=2)
    keys = 128 if padded_head <= 128 else 64
    num_stages = 3 if padded_head <= 64 else 2
    if rows_of_longest <= 64 and cards.generation() == 9:
        return _TileShape(64, keys, 4, num_stages)
    return _TileShape(128, keys, 8, num_stages)


def attention_scratch_bytes(max_seq_len: int) -> int:
    """Most memory that attention takes besides its result."""
    return MAX_PARTIAL_BYTES if max_seq_len > SPLIT_KEYS else 0


@attention.paged_attention.override("cuda")
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    layout: SequenceLayout,
    scale: float,
    value_offset: int,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, key_size = query.shape
    value_size = out.shape[2]
    _, pages_per_block, page_tokens, num_kv_heads, _ = kv_cache.shape
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    # Values that are the beginning of their keys are read with them; the tail is the rest of a key.
    shares_values = value_offset == 0 and value_size <= key_size
    main_size = value_size if shares_values else key_size
    tail_size = key_size - main_size
    padded_main, padded_value = _padded(main_size), _padded(value_size)
    padded_tail = _padded(tail_size) if tail_size else 0
    padded_head = max(padded_main, padded_value)
    is_local = sliding_window is not None or chunk_size is not None
    sizes = (main_size, value_size, tail_size)
    always_masked = is_local or sizes != (padded_main, padded_value, padded_tail)
    shape = _tile_shape(query.dtype, padded_head, layout.max_query_len * group)
    packed_heads = min(group, shape.rows)
    tokens_per_tile = shape.rows // packed_heads
    num_tiles = num_tokens // tokens_per_tile + layout.seq_lens.shape[0]
    head_slices = num_kv_heads * triton.cdiv(group, packed_heads)
    num_splits = triton.cdiv(layout.max_seq_len, SPLIT_KEYS)
    num_parts = min(num_splits, triton.cdiv(PROGRAMS_WANTED, num_tiles * head_slices))
    partial_shape = (num_tokens, num_heads, num_splits, padded_value)
    partials, tops, totals = None, None, None
    cell_bytes = 4 * (padded_value + 2)
    if num_parts > 1 and cell_bytes * math.prod(partial_shape[:3]) <= MAX_PARTIAL_BYTES:
        partials = query.new_empty(partial_shape, dtype=torch.float32)
        tops = query.new_empty(partial_shape[:3], dtype=torch.float32)
        # Not half of one tensor: Triton compiles for its alignment, which would vary by batch.
        totals = torch.empty_like(tops)
    _attention_kernel[(num_tiles, head_slices, 1 if partials is None else num_parts)](
        *(query, kv_cache, block_table, layout.query_start, layout.seq_lens, sinks, out),
        *(partials, tops, totals, layout.seq_lens.shape[0], num_splits),
        *(*query.stride()[:2], *kv_cache.stride()[:4], block_table.stride(0)),
        scale * _LOG2_E if soft_cap is None else 2 * _LOG2_E * scale / soft_cap,
        0.0 if soft_cap is None else soft_cap * _LOG2_E,
        sliding_window or chunk_size or 0,
        num_heads=num_heads,
        group=group,
        packed_heads=packed_heads,
        main_size=main_size,
        padded_main=padded_main,
        tail_size=tail_size,
        padded_tail=padded_tail,
        shares_values=shares_values,
        value_offset=value_offset,
        value_size=value_size,
        padded_value=padded_value,
        pages_per_block=pages_per_block,
        page_tokens=page_tokens,
        has_window=sliding_window is not None,
        has_chunks=chunk_size is not None,
        has_cap=soft_cap is not None,
        tile_rows=shape.rows,
        tile_keys=shape.keys,
        split_keys=SPLIT_KEYS,
        always_masked=always_masked,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if partials is not None:
        heads_at_once = min(4, triton.next_power_of_2(num_heads))
        _combine_kernel[(num_tokens, triton.cdiv(num_heads, heads_at_once))](
            *(partials, tops, totals, layout.query_start, layout.seq_lens, sinks, out),
            *(layout.seq_lens.shape[0], num_splits, sliding_window or chunk_size or 0),
            num_heads=num_heads,
            heads_at_once=heads_at_once,
            value_size=value_size,
            padded_value=padded_value,
            has_window=sliding_window is not None,
            has_chunks=chunk_size is not None,
            split_keys=SPLIT_KEYS,
            num_warps=4,
        )


def _padded(size: int) -> int:
    """Elements of a tile that holds ``size`` elements."""
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit
def _find_request(query_start, num_requests, index, tile_tokens: tl.constexpr, extra: tl.constexpr):
    """The last request r with ``query_start[r] // tile_tokens + r * extra <= index``."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // tile_tokens + middle * extra <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _fold(top, total, acc, new_top, new_total, new_acc):
    """Join the softmax states of two parts of the keys, each [rows], [rows], [rows, head]."""
    both = tl.maximum(top, new_top)
    reference = tl.where(both == float("-inf"), 0.0, both)
    fade = tl.exp2(top - reference)
    new_fade = tl.exp2(new_top - reference)
    total = tl.fma(new_total, new_fade, total * fade)
    acc = tl.fma(new_acc, tl.broadcast_to(new_fade[:, None], new_acc.shape), acc * fade[:, None])
    return both, total, acc


@triton.jit
def _finish(top, total, acc, sinks, heads, known):
    """The weighted mean; ``sinks`` (or None) holds a score without a value per head."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
        reference = tl.maximum(top, sink)
        fade = tl.exp2(top - reference)
        total = tl.fma(total, fade, tl.exp2(sink - reference))
        acc = acc * fade[:, None]
    return acc / tl.where(known, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_requests", "num_splits", "table_stride", "window"])
def _attention_kernel(
    query,
    kv_cache,
    block_table,
    query_start,
    seq_lens,
    sinks,
    out,
    partials,
    tops,
    totals,
    num_requests,
    num_splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    factor,
    cap,
    window,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    packed_heads: tl.constexpr,
    main_size: tl.constexpr,
    padded_main: tl.constexpr,
    tail_size: tl.constexpr,
    padded_tail: tl.constexpr,
    shares_values: tl.constexpr,
    value_offset: tl.constexpr,
    value_size: tl.constexpr,
    padded_value: tl.constexpr,
    pages_per_block: tl.constexpr,
    page_tokens: tl.constexpr,
    has_window: tl.constexpr,
    has_chunks: tl.constexpr,
    has_cap: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    split_keys: tl.constexpr,
    always_masked: tl.constexpr,
):
    """Program (tile of queries from the back, KV head and slice of its group, part)."""
    tile_tokens: tl.constexpr = tile_rows // packed_heads
    slices: tl.constexpr = (group + packed_heads - 1) // packed_heads
    tiles_per_split: tl.constexpr = split_keys // tile_keys
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with many keys start first
    request = _find_request(query_start, num_requests, index, tile_tokens, 1)
    begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - begin
    seq_len = tl.load(seq_lens + request)
    first_token = (index - begin // tile_tokens - request) * tile_tokens
    if first_token >= query_len:
        return
    row = tl.arange(0, tile_rows)
    token = first_token + row // packed_heads
    kv_head = tl.program_id(1) // slices
    head_in_group = tl.program_id(1) % slices * packed_heads + row % packed_heads
    head = kv_head * group + head_in_group
    known = (row < tile_tokens * packed_heads) & (token < query_len) & (head_in_group < group)
    columns = tl.arange(0, padded_main)
    mask = known[:, None] & (columns < main_size)[None, :]
    row_start = (begin + token).to(tl.int64) * query_token_stride + head * query_head_stride
    row_start = query + row_start[:, None]
    rows = tl.load(row_start + columns[None, :], mask=mask, other=0.0)
    tail_rows = None
    if tail_size > 0:
        columns = tl.arange(0, padded_tail)
        mask = known[:, None] & (columns < tail_size)[None, :]
        tail_rows = tl.load(row_start + main_size + columns[None, :], mask=mask, other=0.0)

    context = seq_len - query_len
    position = context + token
    first_position = context + first_token
    last_position = tl.minimum(first_position + tile_tokens, seq_len) - 1
    low_key = 0
    if has_window:
        low_key = tl.maximum(first_position - window + 1, 0)
    if has_chunks:
        low_key = first_position // window * window
    first_tile = low_key // tile_keys
    end_tile = last_position // tile_keys + 1
    whole_end = (first_position + 1) // tile_keys  # every query sees the tiles before this one
    if always_masked:
        whole_end = 0
    kv_start = kv_cache + kv_head * kv_head_stride
    table = block_table + request.to(tl.int64) * table_stride

    top = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    acc = tl.zeros([tile_rows, padded_value], tl.float32)
    columns = tl.arange(0, padded_value)
    mask = known[:, None] & (columns < value_size)[None, :]
    first_split = first_tile // tiles_per_split
    end_split = (end_tile - 1) // tiles_per_split + 1
    for split in range(first_split + tl.program_id(2), end_split, tl.num_programs(2)):
        begin_tile = tl.maximum(first_tile, split * tiles_per_split)
        stop_tile = tl.minimum(end_tile, (split + 1) * tiles_per_split)
        part_top = tl.full([tile_rows], float("-inf"), tl.float32)
        part_total = tl.zeros([tile_rows], tl.float32)
        part_acc = tl.zeros([tile_rows, padded_value], tl.float32)
        # First the tiles that every query sees whole, then the others.
        for masked in tl.static_range(always_masked, 2):
            part_top, part_total, part_acc = visit_tiles(
                *(part_top, part_total, part_acc, rows),
                tail_rows,
                tl.maximum(begin_tile, whole_end) if masked else begin_tile,
                stop_tile if masked else tl.minimum(stop_tile, whole_end),
                *(kv_start, table, block_stride, page_stride, token_stride),
                *(position, low_key, seq_len, factor, cap, window),
                *(main_size, padded_main, tail_size, padded_tail, shares_values),
                *(value_offset, value_size, padded_value, pages_per_block, page_tokens),
                *(has_window, has_chunks, has_cap, tile_keys, masked),
            )
        if partials is None:
            top, total, acc = _fold(top, total, acc, part_top, part_total, part_acc)
        else:
            cell = ((begin + token).to(tl.int64) * num_heads + head) * num_splits + split
            start = partials + cell * padded_value
            tl.store(start[:, None] + columns[None, :], part_acc, mask=mask)
            tl.store(tops + cell, part_top, mask=known)
            tl.store(totals + cell, part_total, mask=known)
    if partials is None:
        result = _finish(top, total, acc, sinks, head, known)
        out_row = ((begin + token).to(tl.int64) * num_heads + head) * value_size
        out_type = out.dtype.element_ty
        tl.store(out + out_row[:, None] + columns[None, :], result.to(out_type), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "num_splits", "window"])
def _combine_kernel(
    partials,
    tops,
    totals,
    query_start,
    seq_lens,
    sinks,
    out,
    num_requests,
    num_splits,
    window,
    num_heads: tl.constexpr,
    heads_at_once: tl.constexpr,
    value_size: tl.constexpr,
    padded_value: tl.constexpr,
    has_window: tl.constexpr,
    has_chunks: tl.constexpr,
    split_keys: tl.constexpr,
):
    """Program (token, some heads): folds the parts of the token's keys in order."""
    token = tl.program_id(0)
    request = _find_request(query_start, num_requests, token, 1, 0)
    end = tl.load(query_start + request + 1)
    position = tl.load(seq_lens + request) - end + token
    head = tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once)
    known = head < num_heads
    columns = tl.arange(0, padded_value)
    mask = known[:, None] & (columns < value_size)[None, :]
    low_key = 0
    if has_window:
        low_key = tl.maximum(position - window + 1, 0)
    if has_chunks:
        low_key = position // window * window
    top = tl.full([heads_at_once], float("-inf"), tl.float32)
    total = tl.zeros([heads_at_once], tl.float32)
    acc = tl.zeros([heads_at_once, padded_value], tl.float32)
    for split in range(low_key // split_keys, position // split_keys + 1):
        cell = (token.to(tl.int64) * num_heads + head) * num_splits + split
        start = partials + cell * padded_value
        part_acc = tl.load(start[:, None] + columns[None, :], mask=mask, other=0.0)
        part_top = tl.load(tops + cell, mask=known, other=0.0)
        part_total = tl.load(totals + cell, mask=known, other=1.0)
        top, total, acc = _fold(top, total, acc, part_top, part_total, part_acc)
    result = _finish(top, total, acc, sinks, head, known)
    out_row = (token.to(tl.int64) * num_heads + head) * value_size
    out_type = out.dtype.element_ty
    tl.store(out + out_row[:, None] + columns[None, :], result.to(out_type), mask=mask)
