"""Paged attention in plain torch, cut at absolute token positions.

The work of one request is a grid of (query tile, key tile) pairs. Tiles start at
multiples of a fixed size and are always computed whole: queries that are not in this
step and keys that may not be read are zeros and masked. Which key tiles a query tile
visits, and the shapes of all products, follow from positions alone, so the bits of a
row do not depend on where a chunk starts or ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.kernels.base import SequenceLayout

QUERY_TILE = 16
KEY_TILE = 128
"""Tokens of a tile. KEY_TILE is a multiple of QUERY_TILE, so that all queries of a tile
have the same last key tile."""


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See :meth:`vllm.kernels.base.Kernels.write_kv`."""
    _, pages_per_block, page_tokens, _, _ = kv_cache.shape
    written = (slots >= 0).nonzero().squeeze(1)
    slots = slots[written]
    page = slots // page_tokens
    content = torch.cat((key[written], value[written]), dim=-1)
    kv_cache[page // pages_per_block, page % pages_per_block, slots % page_tokens] = content


@dataclass(frozen=True)
class _Request:
    """One request of the step, in absolute token positions."""

    first_query: int
    seq_len: int
    block_row: torch.Tensor
    """int32 [max_blocks]"""
    window: int | None

    def first_key(self, position: int) -> int:
        """First key that a query at ``position`` may read."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    layout: SequenceLayout,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See :meth:`vllm.kernels.base.Kernels.paged_attention`."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = layout.query_start.tolist()
    for r, seq_len in enumerate(layout.seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if begin == end:
            continue
        request = _Request(seq_len - (end - begin), seq_len, block_table[r], sliding_window)
        out[begin:end] = _attend(query[begin:end], kv_cache, request, scale, soft_cap, sinks)
    return out


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    request: _Request,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one request; query: [tokens, heads, head_size]. Returns the same shape."""
    num_kv_heads = kv_cache.shape[3]
    tiles = _query_tiles(query, num_kv_heads, request.first_query, scale)
    first_tile = request.first_query // QUERY_TILE
    first_visit = request.first_key(first_tile * QUERY_TILE) // KEY_TILE
    num_tiles, _, num_rows, head_size = tiles.shape
    # The running softmax of each row: maximum, sum of exponentials, weighted values.
    top = tiles.new_full((num_tiles, num_kv_heads, num_rows, 1), float("-inf"))
    total = torch.zeros_like(top)
    acc = torch.zeros_like(tiles)
    if sinks is not None:  # seen before every key
        top.view(num_tiles, num_kv_heads, -1, QUERY_TILE)[:] = sinks.view(num_kv_heads, -1, 1)
        total.fill_(1.0)
    for key_tile in range(first_visit, (request.seq_len - 1) // KEY_TILE + 1):
        keys, values = _key_tile(kv_cache, request, key_tile)
        for i in range(num_tiles):
            tile_start = (first_tile + i) * QUERY_TILE
            first_visited = request.first_key(tile_start) // KEY_TILE
            if not first_visited <= key_tile <= tile_start // KEY_TILE:
                continue
            scores = torch.bmm(tiles[i], keys)  # [kv_heads, group * QUERY_TILE, KEY_TILE]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            _mask(scores, tile_start, key_tile * KEY_TILE, request.window)
            _accumulate(scores, values, top[i], total[i], acc[i])
    acc /= total
    # [tiles, kv_heads, group, QUERY_TILE, head_size] -> [tokens, heads, head_size]
    rows = acc.view(num_tiles, num_kv_heads, -1, QUERY_TILE, head_size).permute(0, 3, 1, 2, 4)
    skipped = request.first_query - first_tile * QUERY_TILE
    return rows.reshape(-1, *query.shape[1:])[skipped : skipped + query.shape[0]]


def _query_tiles(
    query: torch.Tensor, num_kv_heads: int, first_query: int, scale: float
) -> torch.Tensor:
    """Scaled float32 queries as [tiles, kv_heads, group * QUERY_TILE, head_size]."""
    num_tokens, num_heads, head_size = query.shape
    skipped = first_query % QUERY_TILE
    num_tiles = -(-(skipped + num_tokens) // QUERY_TILE)
    padded = query.new_zeros(num_tiles * QUERY_TILE, num_heads, head_size, dtype=torch.float32)
    padded[skipped : skipped + num_tokens] = query
    padded *= scale
    split = padded.view(num_tiles, QUERY_TILE, num_kv_heads, -1, head_size)
    return split.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, -1, head_size)


def _key_tile(
    kv_cache: torch.Tensor, request: _Request, key_tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 keys [kv_heads, head_size, KEY_TILE] and values [kv_heads, KEY_TILE, head_size].

    Only what some query of this step may read is loaded; the rest is zero.
    """
    _, pages_per_block, page_tokens, num_kv_heads, content = kv_cache.shape
    start = key_tile * KEY_TILE
    low = max(start, request.first_key(request.first_query))
    high = min(start + KEY_TILE, request.seq_len)
    tile = kv_cache.new_zeros(num_kv_heads, KEY_TILE, content, dtype=torch.float32)
    if low < high:
        position = torch.arange(low, high, device=kv_cache.device)
        page = position // page_tokens
        block = request.block_row[page // pages_per_block].long()
        loaded = kv_cache[block, page % pages_per_block, position % page_tokens]
        tile[:, low - start : high - start] = loaded.transpose(0, 1)
    keys, values = tile.chunk(2, dim=-1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()


def _mask(scores: torch.Tensor, query_start: int, key_start: int, window: int | None) -> None:
    """Set the scores of keys that a query may not see to minus infinity, in place."""
    query_end, key_end = query_start + QUERY_TILE, key_start + KEY_TILE
    if key_end - 1 <= query_start and (window is None or key_start > query_end - 1 - window):
        return
    position = torch.arange(query_start, query_end, device=scores.device)[:, None]
    key = torch.arange(key_start, key_end, device=scores.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores.view(scores.shape[0], -1, QUERY_TILE, KEY_TILE).masked_fill_(hidden, float("-inf"))


def _accumulate(
    scores: torch.Tensor,
    values: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    acc: torch.Tensor,
) -> None:
    """One step of the online softmax, in place on ``top``, ``total`` and ``acc``.

    A row that sees no key of this tile stays as it is: its factor is exactly 1 and its
    exponentials are exactly 0.
    """
    new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
    # Rows that have seen no key yet would subtract infinity from infinity.
    reference = new_top.masked_fill(new_top == float("-inf"), 0.0)
    factor = torch.exp(top - reference)
    weights = torch.exp(scores - reference)
    total.mul_(factor).add_(weights.sum(dim=-1, keepdim=True))
    acc.mul_(factor).add_(torch.bmm(weights, values))
    top.copy_(new_top)
