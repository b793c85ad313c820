"""RWKV-4's weighted mean in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import wkv as rwkv
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.layout import SequenceLayout, StatePlan

_CHANNELS = 128
"""Of one program."""


@triton.jit
def _wkv_kernel(
    key,
    key_stride,
    value,
    value_stride,
    receptance,
    receptance_stride,
    out,
    out_stride,
    log_decay,
    bonus,
    states,
    block_stride,
    row_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    no_token: tl.constexpr,
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
        decay = tl.load(log_decay + channel, mask=inside, other=0.0)
        extra = tl.load(bonus + channel, mask=inside, other=0.0)
        own_block = tl.load(block_ids + request)
        known = inside & (tl.load(has_states + request) != 0)
        own = states + own_block.to(tl.int64) * block_stride + channel
        top = tl.load(own, mask=known, other=0.0)
        bottom = tl.load(own + row_stride, mask=known, other=0.0)
        greatest = tl.load(own + 2 * row_stride, mask=known, other=no_token)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                k = tl.load(key + t * key_stride + channel, mask=inside, other=0.0).to(tl.float32)
                v = tl.load(value + t * value_stride + channel, mask=inside, other=0.0)
                v = v.to(tl.float32)
                gate = tl.load(receptance + t * receptance_stride + channel, mask=inside, other=0.0)
                limit = tl.maximum(greatest, k + extra)
                kept, added = tl.exp(greatest - limit), tl.exp(k + extra - limit)
                mean = (kept * top + added * v) / (kept * bottom + added)
                row = mean / (1.0 + tl.exp(-gate.to(tl.float32)))
                tl.store(out + t * out_stride + channel, row.to(out.dtype.element_ty), mask=inside)
                limit = tl.maximum(greatest + decay, k)
                kept, added = tl.exp(greatest + decay - limit), tl.exp(k - limit)
                top = kept * top + added * v
                bottom = kept * bottom + added
                greatest = limit
            token = until
            target = states + block * block_stride + channel
            tl.store(target, top, mask=inside)
            tl.store(target + row_stride, bottom, mask=inside)
            tl.store(target + 2 * row_stride, greatest, mask=inside)


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
        *(key, key.stride(0), value, value.stride(0), receptance, receptance.stride(0)),
        *(out, out.stride(0), log_decay, bonus, state_cache, *state_cache.stride()[:2]),
        *(layout.query_start, states.block_ids, states.has_state),
        *(states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks),
        no_token=rwkv.NO_TOKEN,
        num_channels=channels,
        channels=_CHANNELS,
    )
