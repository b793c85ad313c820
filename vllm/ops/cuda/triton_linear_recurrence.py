"""The gated linear recurrence in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import linear_recurrence
from vllm.ops.cuda.triton_walk import read, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 128
"""Channels of one program."""


@triton.jit
def _take(state, t, inputs):
    x, input_gate, decay_gate, out, rate, channel, inside, first, known = inputs
    (mean,) = state
    decay = tl.exp(rate * tl.sigmoid(read(decay_gate, t, channel, inside)))
    root = tl.where((t == first) & (known == 0), 1.0, tl.sqrt(1.0 - decay * decay))
    gate = tl.sigmoid(read(input_gate, t, channel, inside))
    mean = decay * mean + root * gate * read(x, t, channel, inside)
    write(out, t, channel, inside, mean)
    return (mean,)


@triton.jit
def _recurrence_kernel(
    x,
    input_gate,
    decay_gate,
    out,
    rates,
    states,
    tables,
    num_channels: tl.constexpr,
    channels: tl.constexpr,
):
    """One request and ``channels`` of its channels."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < num_channels
    rate = tl.load(rates + channel, mask=inside, other=0.0)
    begin = tl.load(tables.query_start + request).to(tl.int64)
    known = tl.load(tables.has_states + request)
    inputs = (x, input_gate, decay_gate, out, rate, channel, inside, begin, known)
    place = (states.cells + channel, states.strides[0], inside, 0.0)
    walk(_take, inputs, (place,), tables)


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
        *(strided(x), strided(input_gate), strided(decay_gate), strided(out), rates),
        *(strided(state_cache), tables_of(layout, states)),
        num_channels=channels,
        channels=_CHANNELS,
    )
