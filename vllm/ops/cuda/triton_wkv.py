"""RWKV-4's weighted mean in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import wkv as rwkv
from vllm.ops.cuda.triton_walk import read, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 128
"""Channels of one program."""


@triton.jit
def _take(state, t, inputs):
    key, value, receptance, out, decay, bonus, channel, inside = inputs
    top, bottom, greatest = state
    k = read(key, t, channel, inside)
    v = read(value, t, channel, inside)
    gate = read(receptance, t, channel, inside)
    limit = tl.maximum(greatest, k + bonus)
    kept, added = tl.exp(greatest - limit), tl.exp(k + bonus - limit)
    mean = (kept * top + added * v) / (kept * bottom + added)
    write(out, t, channel, inside, mean / (1.0 + tl.exp(-gate)))
    limit = tl.maximum(greatest + decay, k)
    kept, added = tl.exp(greatest + decay - limit), tl.exp(k - limit)
    return kept * top + added * v, kept * bottom + added, limit


@triton.jit
def _wkv_kernel(
    key,
    value,
    receptance,
    out,
    log_decay,
    bonus,
    states,
    tables,
    no_token: tl.constexpr,
    num_channels: tl.constexpr,
    channels: tl.constexpr,
):
    """One request and ``channels`` of its channels."""
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < num_channels
    decay = tl.load(log_decay + channel, mask=inside, other=0.0)
    extra = tl.load(bonus + channel, mask=inside, other=0.0)
    inputs = (key, value, receptance, out, decay, extra, channel, inside)
    cells = states.cells + channel
    stride, row_stride = states.strides
    top = (cells, stride, inside, 0.0)
    bottom = (cells + row_stride, stride, inside, 0.0)
    greatest = (cells + 2 * row_stride, stride, inside, no_token)
    walk(_take, inputs, (top, bottom, greatest), tables)


@rwkv.wkv.override("cuda")
def wkv(
    key: torch.Tensor,
    value: torch.Tensor,
    receptance: torch.Tensor,
    log_decay: torch.Tensor,
    bonus: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    channels = key.shape[1]
    grid = (states.block_ids.shape[0], triton.cdiv(channels, _CHANNELS))
    _wkv_kernel[grid](
        *(strided(key), strided(value), strided(receptance), strided(out), log_decay, bonus),
        *(strided(state_cache), tables_of(layout, states)),
        no_token=rwkv.NO_TOKEN,
        num_channels=channels,
        channels=_CHANNELS,
    )
