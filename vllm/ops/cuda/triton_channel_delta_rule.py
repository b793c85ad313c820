"""The delta rule with decays by channel in Triton, token by token.

Bits do not depend on where steps end.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import channel_delta_rule as rule
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Of a state, in one program."""


@triton.jit
def _delta_kernel(
    qkv,
    qkv_stride,
    log_decays,
    b,
    b_stride,
    out,
    states,
    block_stride,
    head_stride,
    row_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One request, one head and ``columns`` of its state."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    in_row, in_column = row < dk, column < dv
    mask = in_row[:, None] & in_column[None, :]
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if begin < end:
        query = qkv + head * dk + row
        value = qkv + 2 * heads * dk + head * dv + column
        cells = states + head * head_stride + row[:, None] * row_stride + column[None, :]
        own_block = tl.load(block_ids + request)
        known = tl.load(has_states + request) != 0
        own = cells + own_block.to(tl.int64) * block_stride
        state = tl.load(own, mask=mask & known, other=0.0)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                q = tl.load(query + t * qkv_stride, mask=in_row, other=0.0).to(tl.float32)
                k = tl.load(query + heads * dk + t * qkv_stride, mask=in_row, other=0.0)
                k = k.to(tl.float32)
                v = tl.load(value + t * qkv_stride, mask=in_column, other=0.0).to(tl.float32)
                q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
                k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                decays = log_decays + (t * heads + head) * dk + row
                state *= tl.exp(tl.load(decays, mask=in_row, other=0.0))[:, None]
                beta = 1.0 / (1.0 + tl.exp(-tl.load(b + t * b_stride + head).to(tl.float32)))
                update = beta * (v - tl.sum(state * k[:, None], 0))
                state += k[:, None] * update[None, :]
                result = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty)
                tl.store(out + (t * heads + head) * dv + column, result, mask=in_column)
            token = until
            tl.store(cells + block * block_stride, state, mask=mask)


@rule.channel_delta_rule.override("cuda")
def channel_delta_rule(
    qkv: torch.Tensor,
    log_decays: torch.Tensor,
    b: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, heads, dk, dv = state_cache.shape
    grid = (states.block_ids.shape[0], heads, triton.cdiv(dv, _COLUMNS))
    _delta_kernel[grid](
        *(qkv, qkv.stride(0), log_decays, b, b.stride(0), out),
        *(state_cache, *state_cache.stride()[:3]),
        *(layout.query_start, states.block_ids, states.has_state),
        *(states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks),
        heads=heads,
        dk=dk,
        dv=dv,
        scale=dk**-0.5,
        rows=triton.next_power_of_2(dk),
        columns=_COLUMNS,
    )
