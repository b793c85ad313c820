"""Mamba's selective scan in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import selective_scan as scan
from vllm.ops.cuda.triton_walk import read, softplus, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 64
"""Channels of one program: few, so that a single long request fills the card."""


@triton.jit
def _take(state, t, inputs):
    tensors, constants, places, inside, in_entry = inputs
    x, step, b, c, gate, out = tensors
    channel, keys, queries = places
    rate, bias, passed = constants
    (memory,) = state  # [state size, channels]
    value = read(x, t, channel, inside)
    size = softplus(read(step, t, channel, inside) + bias)
    key = read(b, t, keys, in_entry)
    query = read(c, t, queries, in_entry)
    memory *= tl.exp(rate * size[None, :])
    memory += key[:, None] * (size * value)[None, :]
    row = tl.sum(memory * query[:, None], 0) + passed * value
    z = read(gate, t, channel, inside)
    write(out, t, channel, inside, row * (z / (1.0 + tl.exp(-z))))
    return (memory,)


@triton.jit
def _scan_kernel(
    x,
    step,
    b,
    c,
    gate,
    out,
    rates,
    step_bias,
    skip,
    states,
    tables,
    num_channels: tl.constexpr,
    group_channels: tl.constexpr,
    state_size: tl.constexpr,
    rows: tl.constexpr,
    channels: tl.constexpr,
):
    """One request, one group and ``channels`` of its channels."""
    group = tl.program_id(2)
    within = tl.program_id(1) * channels + tl.arange(0, channels)
    channel = group * group_channels + within
    entry = tl.arange(0, rows)
    inside, in_entry = within < group_channels, entry < state_size
    mask = in_entry[:, None] & inside[None, :]
    rate = tl.load(rates + entry[:, None] * num_channels + channel[None, :], mask=mask, other=0.0)
    bias = tl.load(step_bias + channel, mask=inside, other=0.0)
    passed = tl.load(skip + channel, mask=inside, other=0.0)
    places = (channel, group * b.strides[1] + entry, group * c.strides[1] + entry)
    inputs = ((x, step, b, c, gate, out), (rate, bias, passed), places, inside, in_entry)
    cells = states.cells + entry[:, None] * states.strides[1] + channel[None, :]
    walk(_take, inputs, ((cells, states.strides[0], mask, 0.0),), tables)


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
        *(strided(x), strided(step), strided(b), strided(c), strided(gate), strided(out)),
        *(rates, step_bias, skip, strided(state_cache), tables_of(layout, states)),
        num_channels=channels,
        group_channels=channels // groups,
        state_size=state_size,
        rows=triton.next_power_of_2(state_size),
        channels=_CHANNELS,
    )
