"""The mLSTM in Triton, token by token: bits do not depend on where steps end.

One kernel walks over gates, stabiliser and normaliser of each head and leaves three factors a
token; another one over the memory, some of its columns a program.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import mlstm as xlstm
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Of a memory, in one program."""


@triton.jit
def _capped(gate, cap):
    """cap tanh(gate / cap), of one number."""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * gate.to(tl.float32) / cap)) - 1.0)


@triton.jit
def _mlstm_gates_kernel(
    qkv,
    qkv_stride,
    gates,
    gates_stride,
    factors,
    normaliser,
    normaliser_block_stride,
    normaliser_head_stride,
    stabiliser,
    stabiliser_block_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    cap: tl.constexpr,
    epsilon: tl.constexpr,
    heads: tl.constexpr,
    dk: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
):
    """One request and one head."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    inside = row < dk
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if begin < end:
        query = qkv + head * dk + row
        cells = normaliser + head * normaliser_head_stride + row
        own_block = tl.load(block_ids + request)
        known = tl.load(has_states + request) != 0
        own = own_block.to(tl.int64)
        n = tl.load(cells + own * normaliser_block_stride, mask=inside & known, other=0.0)
        m = tl.load(stabiliser + own * stabiliser_block_stride + head, mask=known, other=0.0)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                q = tl.load(query + t * qkv_stride, mask=inside, other=0.0).to(tl.float32)
                k = tl.load(query + heads * dk + t * qkv_stride, mask=inside, other=0.0)
                gate = gates + t * gates_stride + head
                write = _capped(tl.load(gate), cap)
                forget = _capped(tl.load(gate + heads), cap)
                faded = m + tl.minimum(forget, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(forget)))
                m = tl.maximum(faded, write)
                kept = tl.exp(faded - m)
                added = tl.exp(write - m)
                n = kept * n + added * k.to(tl.float32)
                size = tl.maximum(tl.abs(tl.sum(n * q, 0)) * scale, tl.exp(-m)) + epsilon
                factor = factors + (t * heads + head) * 3
                tl.store(factor, kept)
                tl.store(factor + 1, added)
                tl.store(factor + 2, scale / size)
            token = until
            tl.store(cells + block * normaliser_block_stride, n, mask=inside)
            tl.store(stabiliser + block * stabiliser_block_stride + head, m)


@triton.jit
def _mlstm_memory_kernel(
    qkv,
    qkv_stride,
    factors,
    out,
    memory,
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
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One request, one head and ``columns`` of its memory."""
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
        cells = memory + head * head_stride + row[:, None] * row_stride + column[None, :]
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
                v = tl.load(value + t * qkv_stride, mask=in_column, other=0.0).to(tl.float32)
                factor = factors + (t * heads + head) * 3
                added = v * tl.load(factor + 1)
                state = tl.load(factor) * state + k.to(tl.float32)[:, None] * added[None, :]
                result = tl.sum(state * q[:, None], 0) * tl.load(factor + 2)
                target = out + (t * heads + head) * dv + column
                tl.store(target, result.to(out.dtype.element_ty), mask=in_column)
            token = until
            tl.store(cells + block * block_stride, state, mask=mask)


@xlstm.mlstm.override("cuda")
def mlstm(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    gate_cap: float,
    epsilon: float,
    layout: SequenceLayout,
    states: StatePlan,
    memory_cache: torch.Tensor,
    normaliser_cache: torch.Tensor,
    stabiliser_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, heads, dk, dv = memory_cache.shape
    requests, rows = states.block_ids.shape[0], triton.next_power_of_2(dk)
    factors = torch.empty((len(qkv), heads, 3), dtype=torch.float32, device=qkv.device)
    snapshots = (states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks)
    plan = (layout.query_start, states.block_ids, states.has_state, *snapshots)
    _mlstm_gates_kernel[requests, heads](
        *(qkv, qkv.stride(0), gates, gates.stride(0), factors),
        *(normaliser_cache, *normaliser_cache.stride()[:2]),
        *(stabiliser_cache, stabiliser_cache.stride(0), *plan),
        cap=gate_cap,
        epsilon=epsilon,
        heads=heads,
        dk=dk,
        scale=dk**-0.5,
        rows=rows,
    )
    _mlstm_memory_kernel[requests, heads, triton.cdiv(dv, _COLUMNS)](
        *(qkv, qkv.stride(0), factors, out, memory_cache, *memory_cache.stride()[:3], *plan),
        heads=heads,
        dk=dk,
        dv=dv,
        rows=rows,
        columns=_COLUMNS,
    )
