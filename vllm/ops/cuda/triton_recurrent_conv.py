"""Causal convolution over time with states in the pool, in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import recurrent
from vllm.ops.cuda.triton_recurrent_pieces import find_tile
from vllm.ops.cuda.triton_walk import next_stop, tables_of
from vllm.ops.layout import SequenceLayout, StatePlan

_TILE_TOKENS = 32
"""Tokens of a tile, unless each request has one token; other sizes would be compiled when met."""
_TILE_CHANNELS = 128


@triton.jit
def _past_or_new(
    x, x_stride, states, state_stride, position, channels, mask, has_state, past: tl.constexpr
):
    """Inputs [positions, channels]; those before position 0 come from the state."""
    is_new = (position >= 0)[:, None] & mask
    is_past = ((position < 0) & (position >= -past))[:, None] & mask & has_state
    rows = x + position[:, None].to(tl.int64) * x_stride
    new = tl.load(rows + channels[None, :], mask=is_new, other=0.0)
    old = tl.load(
        states + (position + past)[:, None] * state_stride + channels[None, :],
        mask=is_past,
        other=0.0,
    )
    return tl.where((position >= 0)[:, None], new, old)


@triton.jit(do_not_specialize=["num_requests"])
def _conv_kernel(
    x,
    x_stride,
    weight,
    bias,
    out,
    out_stride,
    states,
    block_stride,
    state_stride,
    query_start,
    seq_lens,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    num_requests,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    past_rows: tl.constexpr,
    has_bias: tl.constexpr,
    applies_silu: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_channels: tl.constexpr,
):
    request, tile = find_tile(
        *(tl.program_id(0), query_start, seq_lens, num_requests, tile_tokens, False)
    )
    if request < num_requests:
        past: tl.constexpr = width - 1
        begin = tl.load(query_start + request).to(tl.int64)
        num_tokens = tl.load(query_start + request + 1) - begin
        own_block = tl.load(block_ids + request)
        has_state = tl.load(has_states + request) != 0
        channels = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
        inside = channels < num_channels
        tokens = tile * tile_tokens + tl.arange(0, tile_tokens)
        mask = (tokens < num_tokens)[:, None] & inside[None, :]
        new = x + begin * x_stride
        own = states + own_block.to(tl.int64) * block_stride
        acc = tl.zeros([tile_tokens, tile_channels], tl.float32)
        for tap in tl.static_range(width):
            inputs = _past_or_new(
                *(new, x_stride, own, state_stride, tokens + tap - past),
                *(channels, mask, has_state, past),
            )
            taps = tl.load(weight + channels * width + tap, mask=inside, other=0.0)
            acc += inputs.to(tl.float32) * taps.to(tl.float32)[None, :]
        if has_bias:
            acc += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = acc / (1.0 + tl.exp(-acc)) if applies_silu else acc
        tl.store(
            out + (begin + tokens)[:, None] * out_stride + channels[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )
        # Only a request's first tile reads its state, so only that tile may replace it.
        if tile == 0:
            row = tl.arange(0, past_rows)
            state_mask = (row < past)[:, None] & inside[None, :]
            first = tl.load(snapshot_start + request)
            last = tl.load(snapshot_start + request + 1)
            for i in range(first, last + 1):
                kept, block = next_stop(
                    i, last, num_tokens, own_block, snapshot_tokens, snapshot_blocks
                )
                kept_inputs = _past_or_new(
                    *(new, x_stride, own, state_stride, kept + row - past),
                    *(channels, state_mask, has_state, past),
                )
                tl.debug_barrier()  # all threads have read the state before one writes it
                target = states + block * block_stride
                tl.store(
                    target + row[:, None] * state_stride + channels[None, :],
                    kept_inputs,
                    mask=state_mask,
                )


@recurrent.causal_conv1d.override("cuda")
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    applies_silu: bool,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, channels = x.shape
    width = weight.shape[1]
    num_requests = states.block_ids.shape[0]
    tile_tokens = 1 if layout.max_query_len == 1 else _TILE_TOKENS
    grid = (tokens // tile_tokens + num_requests, triton.cdiv(channels, _TILE_CHANNELS))
    _conv_kernel[grid](
        *(x, x.stride(0), weight, weight if bias is None else bias, out, out.stride(0)),
        *(state_cache, *state_cache.stride()[:2], *tables_of(layout, states), num_requests),
        num_channels=channels,
        width=width,
        past_rows=triton.next_power_of_2(width - 1),
        has_bias=bias is not None,
        applies_silu=applies_silu,
        tile_tokens=tile_tokens,
        tile_channels=_TILE_CHANNELS,
    )
