"""The walk of recurrent Triton kernels from token to token: bits do not depend on where steps end.

A kernel finds its part of a state and calls :func:`walk` with a function for one token. This
function reads and writes rows of tensors, each of which is one argument with its strides.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm.ops.layout import SequenceLayout, StatePlan


class Strided(NamedTuple):
    """A tensor whose last dimension is contiguous."""

    cells: torch.Tensor
    strides: tuple[int, ...]
    """Strides of the other dimensions, in elements."""


def strided(x: torch.Tensor) -> Strided:
    assert x.stride(-1) == 1 or x.shape[-1] <= 1, "the last dimension must be contiguous"
    return Strided(x, x.stride()[:-1])


@triton.jit
def read(x, row, column, inside):
    """Read from ``x`` [rows, columns] as float32; zeros where not ``inside``. row: int64."""
    cells = x.cells + column + row * x.strides[0]
    return tl.load(cells, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write(x, row, column, inside, values):
    """Round ``values`` to the dtype of ``x`` and write them to the same places."""
    cells = x.cells + column + row * x.strides[0]
    tl.store(cells, values.to(x.cells.dtype.element_ty), mask=inside)


class Tables(NamedTuple):
    """The tensors of a step's metadata that recurrent kernels read."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_ids: torch.Tensor
    has_states: torch.Tensor
    snapshot_start: torch.Tensor
    snapshot_tokens: torch.Tensor
    snapshot_blocks: torch.Tensor


def tables_of(layout: SequenceLayout, states: StatePlan) -> Tables:
    requests = (layout.query_start, layout.seq_lens, states.block_ids, states.has_state)
    return Tables(*requests, states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks)


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small  # log(1 + small) is exact even if this sum loses digits of small
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / kept))
    return tl.maximum(x, 0.0) + log


@triton.jit
def next_stop(i, last, end, own_block, snapshot_tokens, snapshot_blocks):
    """The i-th stop of a request's walk: (token of its step before which the walk stops, block that
    gets the state). Stops are the snapshots up to ``last``, then the request's ``end``, for its own
    block."""
    token = tl.load(snapshot_tokens + i, mask=i < last, other=0)
    block = tl.load(snapshot_blocks + i, mask=i < last, other=0)
    return tl.where(i < last, token, end), tl.where(i < last, block, own_block).to(tl.int64)


@triton.jit
def last_stop(i, first, snapshot_tokens):
    """The token at which the walk to the i-th stop begins: that of the stop before, or 0.

    It is read anew each time. Triton 3.6 and 3.7 lose an integer that a loop carries as the bound
    of a loop inside it: it keeps its first value, so that all tokens are walked again.
    """
    return tl.load(snapshot_tokens + i - 1, mask=i > first, other=0)


@triton.jit
def _stored(place, block, known):
    cells, stride, inside, absent = place
    return tl.load(cells + block * stride, mask=inside & known, other=absent)


@triton.jit
def walk(take: tl.constexpr, inputs, places, tables):
    """Advance the state of request ``program_id(0)`` over its tokens of this step.

    take(state, t, inputs) returns the state after token ``t`` (int64) of the batch, and writes the
    token's output. A state is a tuple of tensors. For each, places has its address in block 0, the
    stride of blocks, the mask of its elements, and their values if there is no state.
    """
    request = tl.program_id(0)
    begin = tl.load(tables.query_start + request).to(tl.int64)
    end = tl.load(tables.query_start + request + 1).to(tl.int64)
    if begin < end:
        own_block = tl.load(tables.block_ids + request)
        known = tl.load(tables.has_states + request) != 0
        state = [_stored(place, own_block.to(tl.int64), known) for place in places]
        first = tl.load(tables.snapshot_start + request)
        last = tl.load(tables.snapshot_start + request + 1)
        snapshots = (tables.snapshot_tokens, tables.snapshot_blocks)
        for i in range(first, last + 1):
            until, block = next_stop(i, last, end - begin, own_block, *snapshots)
            start = last_stop(i, first, tables.snapshot_tokens)
            for t in range(begin + start, begin + until):
                state = take(state, t, inputs)
            for n in tl.static_range(len(places)):
                cells, stride, inside, _ = places[n]
                tl.store(cells + block * stride, state[n], mask=inside)
