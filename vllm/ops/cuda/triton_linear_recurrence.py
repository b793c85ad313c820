"""The gated linear recurrence in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import linear_recurrence
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 128
"""Of one program."""


@triton.jit
def _sigmoid(rows, offset, inside):
    x = tl.load(rows + offset, mask=inside, other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _recurrence_kernel(
    x,
    x_stride,
    input_gate,
    input_stride,
    decay_gate,
    decay_stride,
    out,
    out_stride,
    rates,
    states,
    block_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    num_channels: tl.constexpr,
    channels: tl.constexpr,
):
    """One request and ``channels`` of its channels."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < num_channels
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if begin < end:
        rate = tl.load(rates + channel, mask=inside, other=0.0)
        own_block = tl.load(block_ids + request)
        known = tl.load(has_states + request) != 0
        own = states + own_block.to(tl.int64) * block_stride + channel
        state = tl.load(own, mask=inside & known, other=0.0)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                decay = tl.exp(rate * _sigmoid(decay_gate, t * decay_stride + channel, inside))
                root = tl.where((t == begin) & (known == 0), 1.0, tl.sqrt(1.0 - decay * decay))
                gate = _sigmoid(input_gate, t * input_stride + channel, inside)
                value = tl.load(x + t * x_stride + channel, mask=inside, other=0.0)
                state = decay * state + root * gate * value.to(tl.float32)
                row = state.to(out.dtype.element_ty)
                tl.store(out + t * out_stride + channel, row, mask=inside)
            token = until
            target = states + block * block_stride + channel
            tl.store(target, state, mask=inside)


@linear_recurrence.gated_linear_recurrence.override("cuda")
def gated_linear_recurrence(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    rates: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    channels = x.shape[1]
    grid = (states.block_ids.shape[0], triton.cdiv(channels, _CHANNELS))
    _recurrence_kernel[grid](
        *(x, x.stride(0), input_gate, input_gate.stride(0), decay_gate, decay_gate.stride(0)),
        *(out, out.stride(0), rates, state_cache, state_cache.stride(0)),
        *(layout.query_start, states.block_ids, states.has_state),
        *(states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks),
        num_channels=channels,
        channels=_CHANNELS,
    )
