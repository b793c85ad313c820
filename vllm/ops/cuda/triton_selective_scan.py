"""Mamba's selective scan in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import selective_scan as scan
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 64
"""Of one program: few, so that a single long request fills the card."""


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small  # log(1 + small), also where the sum loses digits of small
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / kept))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _scan_kernel(
    x,
    x_stride,
    step,
    step_stride,
    b,
    b_stride,
    b_group_stride,
    c,
    c_stride,
    c_group_stride,
    gate,
    gate_stride,
    out,
    out_stride,
    rates,
    step_bias,
    skip,
    states,
    block_stride,
    row_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    num_channels: tl.constexpr,
    group_channels: tl.constexpr,
    state_size: tl.constexpr,
    rows: tl.constexpr,
    channels: tl.constexpr,
):
    """One request, one group and ``channels`` of its channels."""
    request = tl.program_id(0)
    group = tl.program_id(2)
    within = tl.program_id(1) * channels + tl.arange(0, channels)
    channel = group * group_channels + within
    entry = tl.arange(0, rows)
    inside = within < group_channels
    mask = (entry < state_size)[:, None] & inside[None, :]
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if begin < end:
        rate = tl.load(
            rates + entry[:, None] * num_channels + channel[None, :], mask=mask, other=0.0
        )
        bias = tl.load(step_bias + channel, mask=inside, other=0.0)
        passed = tl.load(skip + channel, mask=inside, other=0.0)
        cells = states + entry[:, None] * row_stride + channel[None, :]
        own_block = tl.load(block_ids + request)
        known = tl.load(has_states + request) != 0
        own = cells + own_block.to(tl.int64) * block_stride
        state = tl.load(own, mask=mask & known, other=0.0)
        keys = b + group * b_group_stride + entry
        queries = c + group * c_group_stride + entry
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                value = tl.load(x + t * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
                size = tl.load(step + t * step_stride + channel, mask=inside, other=0.0)
                size = _softplus(size.to(tl.float32) + bias)
                key = tl.load(keys + t * b_stride, mask=entry < state_size, other=0.0)
                query = tl.load(queries + t * c_stride, mask=entry < state_size, other=0.0)
                state *= tl.exp(rate * size[None, :])
                state += key.to(tl.float32)[:, None] * (size * value)[None, :]
                row = tl.sum(state * query.to(tl.float32)[:, None], 0) + passed * value
                z = tl.load(gate + t * gate_stride + channel, mask=inside, other=0.0)
                z = z.to(tl.float32)
                row *= z / (1.0 + tl.exp(-z))
                tl.store(out + t * out_stride + channel, row.to(out.dtype.element_ty), mask=inside)
            token = until
            tl.store(cells + block * block_stride, state, mask=mask)


@scan.selective_scan.override("cuda")
def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rates: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    state_size, channels = rates.shape
    groups = b.shape[1]
    grid = (states.block_ids.shape[0], triton.cdiv(channels // groups, _CHANNELS), groups)
    _scan_kernel[grid](
        *(x, x.stride(0), step, step.stride(0)),
        *(b, b.stride(0), b.stride(1), c, c.stride(0), c.stride(1)),
        *(gate, gate.stride(0), out, out.stride(0), rates, step_bias, skip),
        *(state_cache, state_cache.stride(0), state_cache.stride(1)),
        *(layout.query_start, states.block_ids, states.has_state),
        *(states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks),
        num_channels=channels,
        group_channels=channels // groups,
        state_size=state_size,
        rows=triton.next_power_of_2(state_size),
        channels=_CHANNELS,
    )
