"""The online softmax over tiles of paged keys, in Triton: the inner loops of attention."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _find_keys(tile, tile_keys: tl.constexpr, page_tokens: tl.constexpr):
    """(page, offset in it) of each key of a tile."""
    row = tl.arange(0, tile_keys)
    if tile_keys % page_tokens == 0:  # then the offsets are the same for every tile
        return tile * (tile_keys // page_tokens) + row // page_tokens, row % page_tokens
    key = tile * tile_keys + row
    return key // page_tokens, key % page_tokens


@triton.jit
def _weigh(scores, multiplier, top, total):
    """Advance the online softmax by a tile: (top, total, factor for earlier sums, weights).

    The products that a compiler could fuse are fused by hand, so that all forms round alike.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * multiplier)
    # Rows that have seen no key yet would subtract infinity from infinity.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, multiplier + tl.zeros_like(scores), -reference[:, None]))
    fade = tl.exp2(top - reference)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    return new_top, total, fade, weights


@triton.jit
def visit_tiles(
    top,
    total,
    acc,
    query,
    query_tail,
    begin,
    end,
    kv_head,
    table,
    block_stride,
    page_stride,
    token_stride,
    position,
    low_key,
    seq_len,
    factor,
    cap,
    window,
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
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
):
    """The online softmax over key tiles ``begin .. end - 1``, which are whole unless ``masked``."""
    key_columns = tl.arange(0, padded_main)
    value_columns = tl.arange(0, padded_value)
    for tile in range(begin, end):
        key = tile * tile_keys + tl.arange(0, tile_keys)
        page, in_page = _find_keys(tile, tile_keys, page_tokens)
        if masked:
            stored = (key >= low_key) & (key < seq_len)
            block = tl.load(table + page // pages_per_block, mask=stored, other=0)
        else:
            block = tl.load(table + page // pages_per_block)
        in_block = page % pages_per_block * page_stride + in_page * token_stride
        content = kv_head + (block.to(tl.int64) * block_stride + in_block)[:, None]
        key_cell = content + key_columns[None, :]
        if masked:
            key_mask = stored[:, None] & (key_columns < main_size)[None, :]
            keys = tl.load(key_cell, mask=key_mask, other=0.0)
        else:
            keys = tl.load(key_cell)
        if shares_values:
            values = keys
        else:
            value_cell = content + value_offset + value_columns[None, :]
            if masked:
                value_mask = stored[:, None] & (value_columns < value_size)[None, :]
                values = tl.load(value_cell, mask=value_mask, other=0.0)
            else:
                values = tl.load(value_cell)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if tail_size > 0:
            tail_columns = tl.arange(0, padded_tail)
            tail_cell = content + main_size + tail_columns[None, :]
            if masked:
                tail_mask = stored[:, None] & (tail_columns < tail_size)[None, :]
                tails = tl.load(tail_cell, mask=tail_mask, other=0.0)
            else:
                tails = tl.load(tail_cell)
            scores = tl.dot(query_tail, tl.trans(tails), scores, input_precision="ieee")
        if has_cap:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); the cap itself is the factor
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * factor))
            multiplier = cap
        else:
            multiplier = factor
        if masked:
            visible = key[None, :] <= position[:, None]
            if has_window:
                visible = visible & (key[None, :] > position[:, None] - window)
            if has_chunks:
                visible = visible & (key[None, :] >= (position // window * window)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        top, total, fade, weights = _weigh(scores, multiplier, top, total)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return top, total, acc
