"""The gated delta rule token by token, in Triton: decode, short pieces, odd snapshots.

The state stays in float32 and does not depend on where a piece ends, so these tokens have
the same bits however they are cut.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.triton_recurrent_pieces import split_request
from vllm.ops.cuda.triton_walk import last_stop, next_stop, softplus


@triton.jit
def gates(a, b, a_log, dt_bias, beta_scale: tl.constexpr):
    """(log of the decay, beta) in float32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    log_decay = -tl.exp(a_log.to(tl.float32)) * softplus(x)
    return log_decay, beta_scale / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def _walk(
    state,
    start,
    stop,
    query,
    value,
    a,
    b,
    out,
    row_mask,
    column_mask,
    qkv_stride,
    a_stride,
    b_stride,
    out_stride,
    a_log,
    dt_bias,
    key_offset: tl.constexpr,
    scale: tl.constexpr,
    beta_scale: tl.constexpr,
    with_output: tl.constexpr,
):
    """Advance ``state`` [dk, dv] over tokens [start, stop), int64; pointers point to token 0."""
    for t in range(start, stop):
        q = tl.load(query + t * qkv_stride, mask=row_mask, other=0.0).to(tl.float32)
        k = tl.load(query + key_offset + t * qkv_stride, mask=row_mask, other=0.0)
        k = k.to(tl.float32)
        v = tl.load(value + t * qkv_stride, mask=column_mask, other=0.0).to(tl.float32)
        log_decay, beta = gates(
            tl.load(a + t * a_stride), tl.load(b + t * b_stride), a_log, dt_bias, beta_scale
        )
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state *= tl.exp(log_decay)
        update = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * update[None, :]
        if with_output:
            row = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty)
            tl.store(out + t * out_stride, row, mask=column_mask)
    return state


@triton.jit
def step_kernel(
    qkv,
    qkv_stride,
    a,
    a_stride,
    b,
    b_stride,
    a_log,
    dt_bias,
    out,
    states,
    block_stride,
    head_stride,
    row_stride,
    query_start,
    seq_lens,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    num_k_heads: tl.constexpr,
    num_v_heads: tl.constexpr,
    beta_scale: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    scale: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    after_chunks: tl.constexpr,
):
    """One request, one v-head and ``columns`` of its state.

    Walks the tokens before the first whole chunk. With ``after_chunks`` it walks the tokens
    after the last one instead. It then also advances snapshots inside chunks to their tokens:
    their blocks hold the state at the chunk boundary below.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    mask = (row < dk)[:, None] & (column < dv)[None, :]
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    before, chunks = split_request(begin, end, tl.load(seq_lens + request), chunk)
    chunks_end = before + chunks * chunk
    qkv += begin * qkv_stride
    query = qkv + head // (num_v_heads // num_k_heads) * dk + row
    value = qkv + 2 * num_k_heads * dk + head * dv + column
    a += begin * a_stride + head
    b += begin * b_stride + head
    out_stride: tl.constexpr = num_v_heads * dv
    out += begin * out_stride + head * dv + column
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    states += head * head_stride + row[:, None] * row_stride + column[None, :]
    first = tl.load(snapshot_start + request)
    last = tl.load(snapshot_start + request + 1)
    start = tl.where(after_chunks, chunks_end, 0)
    stop = tl.where(after_chunks, end - begin, before)
    if start < stop:
        own_block = tl.load(block_ids + request)
        known = (tl.load(has_states + request) != 0) | after_chunks
        own = states + own_block.to(tl.int64) * block_stride
        state = tl.load(own, mask=mask & known, other=0.0)
        for i in range(first, last + 1):  # the last turn goes to the end, for its own block
            kept, block = next_stop(i, last, stop, own_block, snapshot_tokens, snapshot_blocks)
            t = tl.minimum(tl.maximum(last_stop(i, first, snapshot_tokens), start), stop)
            until = tl.maximum(tl.minimum(kept, stop), t)
            state = _walk(
                *(state, t, until, query, value, a, b, out, row < dk, column < dv),
                *(qkv_stride, a_stride, b_stride, out_stride, rate, bias),
                *(num_k_heads * dk, scale, beta_scale, True),
            )
            if (kept > start) & (kept <= stop):
                tl.store(states + block * block_stride, state, mask=mask)
    if after_chunks:
        for i in range(first, last):
            kept = tl.load(snapshot_tokens + i)
            past = (kept - before) % chunk
            if (kept > before) & (kept < chunks_end) & (past > 0):
                block = tl.load(snapshot_blocks + i).to(tl.int64)
                state = tl.load(states + block * block_stride, mask=mask, other=0.0)
                state = _walk(
                    *(state, kept - past, kept, query, value, a, b, out, row < dk, column < dv),
                    *(qkv_stride, a_stride, b_stride, out_stride, rate, bias),
                    *(num_k_heads * dk, scale, beta_scale, False),
                )
                tl.store(states + block * block_stride, state, mask=mask)
