"""Causal attention over the pool.

In plain torch the work of one request is a grid of (query tile, key tile) pairs. Tiles start at
multiples of a fixed size and are always computed whole: queries that are not in this
step and keys that may not be read are zeros and masked. The key tiles that a query tile
visits, and the shapes of all products, follow from positions alone. So the bits of a
row do not depend on where a chunk starts or ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from vllm.ops.layout import SequenceLayout
from vllm.ops.operation import KERNEL_DTYPES, Written, operation
from vllm.utils.token_spread import WHOLE, TokenSpread

_LOG2_E = math.log2(math.e)

QUERY_TILE = 16
KEY_TILE = 128
"""Tokens of a tile. KEY_TILE is a multiple of QUERY_TILE, so all queries of a tile have the same
last key tile."""


@operation
def write_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv_cache: Written
) -> None:
    """Store keys and values of the flat batch.

    key: [tokens, kv_heads, key_size]; value: [tokens, kv_heads, value_size], which may be 0;
    slots: int64 [tokens], ``block * tokens_per_block + offset``, -1 to skip the token; kv_cache:
    strided view [blocks, pages, page_tokens, kv_heads, key_size + value_size].
    """
    _, pages_per_block, page_tokens, _, _ = kv_cache.shape
    written = (slots >= 0).nonzero().squeeze(1)
    slots = slots[written]
    page = slots // page_tokens
    content = torch.cat((key[written], value[written]), dim=-1)
    kv_cache[page // pages_per_block, page % pages_per_block, slots % page_tokens] = content


@write_kv.contract
def _(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor) -> None:
    assert slots.dtype is torch.int64 and slots.is_contiguous()
    assert slots.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]
    assert key.dtype is value.dtype is kv_cache.dtype and key.shape[1] == kv_cache.shape[3]
    assert kv_cache.shape[4] == key.shape[2] + value.shape[2]
    assert key.stride(2) == value.stride(2) == kv_cache.stride(4) == 1


@dataclass(frozen=True)
class _Request:
    """One request of the step, in absolute token positions."""

    first_query: int
    seq_len: int
    block_row: torch.Tensor
    """int32 [max_blocks]"""
    window: int | None = None
    chunk_size: int | None = None
    spread: TokenSpread = WHOLE
    rank: int = 0
    """The rank of ``spread`` whose tokens are in the pool. Keys are numbered by their places."""

    @property
    def num_keys(self) -> int:
        """Number of keys in the pool."""
        return self.spread.count(self.seq_len, self.rank)

    def first_key(self, position: int) -> int:
        """First key that a query at ``position`` may read; later queries never begin earlier."""
        if self.chunk_size is not None:
            return position // self.chunk_size * self.chunk_size
        return 0 if self.window is None else max(0, position - self.window + 1)


@operation
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
    out: Written,
) -> None:
    """Causal attention of the flat batch over the pool, whose keys are already written.

    query: [tokens, heads, key_size]; kv_cache: as for :func:`write_kv`: a token's key is the
    first key_size elements, its value the elements from ``value_offset`` on (in latent attention
    values lie inside the keys); block_table: int32 [requests, max_blocks]; out: [tokens, heads,
    value_size], dense. Query head h reads KV head ``h // (heads / kv_heads)``. With a sliding
    window w a query at position p reads keys p - w + 1 .. p; blocks wholly before every query's
    window are never read (their table entry may be 0). With chunks of size c it reads keys
    ``p // c * c`` .. p instead, and blocks wholly before these are not read either; there is no
    window then. With a soft cap c a scaled score s becomes ``c * tanh(s / c)``. sinks: [heads],
    dense: one more score per head, neither scaled nor capped, which takes part in the softmax but
    has no value. Keys are visited in tiles that start at absolute multiples of a fixed size;
    softmax weights may be rounded to the values' dtype. Source: Kwon et al. 2023; Milakov and
    Gimelshein 2018 (online softmax).
    """
    values = _Values(value_offset, out.shape[2])
    for rows, request in _requests(layout, block_table):
        request = replace(request, window=sliding_window, chunk_size=chunk_size)
        states = _attend(query[rows], kv_cache, request, scale, values, soft_cap, sinks)
        out[rows] = states.values / states.total


@paged_attention.contract
def _(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    value_offset: int,
    sliding_window: int | None,
    chunk_size: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    assert query.dtype is kv_cache.dtype is out.dtype and out.is_contiguous() and scale > 0
    assert query.shape[:2] == out.shape[:2] and query.shape[1] % kv_cache.shape[3] == 0
    assert query.stride(2) == kv_cache.stride(4) == 1 and query.shape[2] <= kv_cache.shape[4]
    assert 0 <= value_offset <= kv_cache.shape[4] - out.shape[2]
    assert block_table.dtype is torch.int32 and block_table.stride(1) == 1
    assert chunk_size is None or (chunk_size > 0 and sliding_window is None)
    assert sinks is None or (sinks.shape == (query.shape[1],) and sinks.is_contiguous())
    assert sinks is None or sinks.dtype in KERNEL_DTYPES


@operation
def paged_attention_part(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    layout: SequenceLayout,
    scale: float,
    value_offset: int,
    soft_cap: float | None,
    ranks: int,
    rank: int,
    interleave: int,
    out: Written,
) -> None:
    """The part of :func:`paged_attention` of one rank, over its tokens of each sequence.

    The tokens are spread as ``TokenSpread(ranks, interleave)`` has it; kv_cache has those of
    ``rank`` one after another. out: float32 [tokens, heads, value_size + 2], dense: the sum of the
    values, each weighted by ``2 ** (s - m)`` for its score s in units of log 2; the largest score
    m, which is minus infinity where a query sees no key of this rank; the sum of the weights.
    """
    values = _Values(value_offset, out.shape[2] - 2)
    for rows, request in _requests(layout, block_table):
        request = replace(request, spread=TokenSpread(ranks, interleave), rank=rank)
        states = _attend(query[rows], kv_cache, request, scale, values, soft_cap, None)
        out[rows] = torch.cat((states.values, states.top * _LOG2_E, states.total), dim=-1)


@paged_attention_part.contract
def _(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    value_offset: int,
    ranks: int,
    rank: int,
    interleave: int,
    out: torch.Tensor,
) -> None:
    assert query.dtype is kv_cache.dtype and scale > 0
    assert out.dtype is torch.float32 and out.is_contiguous()
    assert query.shape[:2] == out.shape[:2] and query.shape[1] % kv_cache.shape[3] == 0
    assert query.stride(2) == kv_cache.stride(4) == 1 and query.shape[2] <= kv_cache.shape[4]
    assert 0 <= value_offset <= kv_cache.shape[4] - (out.shape[2] - 2)
    assert block_table.dtype is torch.int32 and block_table.stride(1) == 1
    assert 0 <= rank < ranks and interleave > 0


def _requests(
    layout: SequenceLayout, block_table: torch.Tensor
) -> Iterator[tuple[slice, _Request]]:
    """Yield the rows of each request that has some."""
    starts = layout.query_start.tolist()
    for r, seq_len in enumerate(layout.seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if begin < end:
            yield slice(begin, end), _Request(seq_len - (end - begin), seq_len, block_table[r])


class _States(NamedTuple):
    """The softmax of some rows: [tokens, heads, value_size], and twice [tokens, heads, 1]."""

    values: torch.Tensor
    """Sum of the weighted values."""
    top: torch.Tensor
    """The largest score."""
    total: torch.Tensor
    """Sum of the weights."""


class _Values(NamedTuple):
    """The place of the value in a token's content."""

    offset: int
    size: int


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    request: _Request,
    scale: float,
    values: _Values,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> _States:
    """Attend for one request with queries [tokens, heads, key_size]."""
    num_kv_heads = kv_cache.shape[3]
    tiles = _query_tiles(query, num_kv_heads, request.first_query, scale)
    first_tile = request.first_query // QUERY_TILE
    first_visit = request.first_key(first_tile * QUERY_TILE) // KEY_TILE
    num_tiles, _, num_rows, _ = tiles.shape
    # The running softmax of each row: maximum, sum of exponentials, weighted values.
    top = tiles.new_full((num_tiles, num_kv_heads, num_rows, 1), float("-inf"))
    total = torch.zeros_like(top)
    acc = tiles.new_zeros((*tiles.shape[:3], values.size))
    if sinks is not None:  # they come before all keys
        top.view(num_tiles, num_kv_heads, -1, QUERY_TILE)[:] = sinks.view(num_kv_heads, -1, 1)
        total.fill_(1.0)
    for key_tile in range(first_visit, (request.num_keys - 1) // KEY_TILE + 1):
        first_position = request.spread.position_of(key_tile * KEY_TILE, request.rank)
        keys, tile_values = _key_tile(kv_cache, request, key_tile, query.shape[2], values)
        for i in range(num_tiles):
            tile_start = (first_tile + i) * QUERY_TILE
            first_visited = request.first_key(tile_start) // KEY_TILE
            if key_tile < first_visited or first_position >= tile_start + QUERY_TILE:
                continue
            scores = torch.bmm(tiles[i], keys)  # [kv_heads, group * QUERY_TILE, KEY_TILE]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            _mask(scores, tile_start, key_tile * KEY_TILE, request)
            _accumulate(scores, tile_values, top[i], total[i], acc[i])
    skipped = request.first_query - first_tile * QUERY_TILE

    def by_token(state: torch.Tensor) -> torch.Tensor:
        # [tiles, kv_heads, group, QUERY_TILE, n] -> [tokens, heads, n]
        split = state.view(num_tiles, num_kv_heads, -1, QUERY_TILE, state.shape[-1])
        flat = split.permute(0, 3, 1, 2, 4).reshape(-1, query.shape[1], state.shape[-1])
        return flat[skipped : skipped + query.shape[0]]

    return _States(by_token(acc), by_token(top), by_token(total))


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
    kv_cache: torch.Tensor, request: _Request, key_tile: int, key_size: int, of_value: _Values
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 keys [kv_heads, key_size, KEY_TILE] and values [kv_heads, KEY_TILE, value_size].

    Only keys and values that some query of this step may read are loaded; the rest is zero.
    """
    _, pages_per_block, page_tokens, num_kv_heads, content = kv_cache.shape
    start = key_tile * KEY_TILE
    low = max(start, request.first_key(request.first_query))
    high = min(start + KEY_TILE, request.num_keys)
    tile = kv_cache.new_zeros(num_kv_heads, KEY_TILE, content, dtype=torch.float32)
    if low < high:
        position = torch.arange(low, high, device=kv_cache.device)
        page = position // page_tokens
        block = request.block_row[page // pages_per_block].long()
        loaded = kv_cache[block, page % pages_per_block, position % page_tokens]
        tile[:, low - start : high - start] = loaded.transpose(0, 1)
    values = tile.narrow(2, of_value.offset, of_value.size)
    return tile[..., :key_size].transpose(1, 2).contiguous(), values.contiguous()


def _mask(scores: torch.Tensor, query_start: int, key_start: int, request: _Request) -> None:
    """Set the scores of keys that a query may not see to minus infinity, in place."""
    query_end = query_start + QUERY_TILE
    places = torch.arange(key_start, key_start + KEY_TILE)
    key = request.spread.position_of(places, request.rank)
    if key[-1] <= query_start and key[0] >= request.first_key(query_end - 1):
        return
    position = torch.arange(query_start, query_end, device=scores.device)[:, None]
    key = key.to(scores.device)
    hidden = key > position
    if request.chunk_size is not None:
        hidden |= key < position // request.chunk_size * request.chunk_size
    elif request.window is not None:
        hidden |= key <= position - request.window
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
    exponentials are exactly 0. A value that is not finite turns only the rows that see it to NaN.
    (Multiplied by a weight of 0 it would be NaN, too.)
    """
    new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
    # Rows that have seen no key yet would subtract infinity from infinity.
    reference = new_top.masked_fill(new_top == float("-inf"), 0.0)
    factor = torch.exp(top - reference)
    weights = torch.exp(scores - reference)
    total.mul_(factor).add_(weights.sum(dim=-1, keepdim=True))
    spoilt = ~values.isfinite()
    acc.mul_(factor).add_(torch.bmm(weights, values.masked_fill(spoilt, 0.0)))
    if spoilt.any():
        seen = torch.bmm((scores > float("-inf")).float(), spoilt.float()) > 0
        acc.masked_fill_(seen, float("nan"))
    top.copy_(new_top)
