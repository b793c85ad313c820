"""The pieces of work into which recurrent Triton kernels cut the tokens of a step.

    tokens of a request in this step:   before | chunk | chunk | chunk | after
    absolute positions:                        ^ multiples of CHUNK    ^

Everything is computed on the device, from the tensors of the step's metadata.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm.ops.layout import SequenceLayout, StatePlan

CHUNK = 64
"""Tokens of a chunk of the gated delta rule; chunks start at absolute multiples of it."""


class DeltaRuleCall(NamedTuple):
    """Arguments of :func:`vllm.ops.recurrent.gated_delta_rule`, in their order."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    num_k_heads: int
    beta_scale: float
    layout: SequenceLayout
    states: StatePlan
    state_cache: torch.Tensor
    pending: Sequence[torch.Tensor]
    out: torch.Tensor


@triton.jit
def split_request(begin, end, seq_len, chunk: tl.constexpr):
    """(tokens before the first whole chunk, number of whole chunks), elementwise.

    A request without a whole chunk has all its tokens before the first one.
    """
    num_tokens = end - begin
    before = (chunk - (seq_len - num_tokens) % chunk) % chunk
    chunks = tl.maximum(num_tokens - before, 0) // chunk
    return tl.where(chunks == 0, num_tokens, before), chunks


@triton.jit
def _num_tiles(requests, limit, query_start, seq_lens, tile_tokens: tl.constexpr, aligned):
    """Number of tiles of each request; 0 from request ``limit`` on."""
    inside = requests < limit
    begin = tl.load(query_start + requests, mask=inside, other=0)
    end = tl.load(query_start + requests + 1, mask=inside, other=0)
    if aligned:
        seq_len = tl.load(seq_lens + requests, mask=inside, other=0)
        _, tiles = split_request(begin, end, seq_len, tile_tokens)
    else:
        tiles = (end - begin + tile_tokens - 1) // tile_tokens
    return tiles


@triton.jit
def find_tile(
    tile, query_start, seq_lens, num_requests, tile_tokens: tl.constexpr, aligned: tl.constexpr
):
    """(request, index in it) of a tile, if each request is cut into tiles by itself.

    ``aligned``: tiles are the whole chunks; else they are pieces from the request's first token on.
    The request is ``num_requests`` if there are not so many tiles.
    """
    request = 0
    before = 0  # tiles of the requests before ``request``
    total = 0
    for base in range(0, num_requests, 128):
        requests = base + tl.arange(0, 128)
        tiles = _num_tiles(requests, num_requests, query_start, seq_lens, tile_tokens, aligned)
        passed = (requests < num_requests) & (total + tl.cumsum(tiles, 0) <= tile)
        request += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        total += tl.sum(tiles, 0)
    return request, tile - before


@triton.jit
def chunks_before(request, query_start, seq_lens, chunk: tl.constexpr):
    """Number of whole chunks of all requests before ``request``."""
    total = 0
    for base in range(0, request, 128):
        requests = base + tl.arange(0, 128)
        total += tl.sum(_num_tiles(requests, request, query_start, seq_lens, chunk, True), 0)
    return total
