"""The gated delta rule over whole chunks of tokens, in Triton.

Within a chunk of C tokens that starts from state S, with keys K, queries Q and values V as
rows, g the running sum of the log decays, G[i, j] = exp(g_i - g_j) and beta the gates, the
recurrence of the paper (Yang et al. 2024) unrolls to

    L = strictly lower part of beta_i G[i, j] (K K^T)[i, j]
    U = (I + L)^-1 diag(beta) (V - diag(exp g) K S)          what each token adds: K^T U
    O = diag(exp g) Q S + lower part of (G * Q K^T) U
    S' = exp(g_C) S + K^T diag(exp(g_C - g)) U

``prepare_kernel`` computes what does not depend on S for all chunks at once,
``scan_kernel`` walks over the chunks of a request.

Products run on tensor cores in bfloat16 or float16 with float32 sums. Queries, keys and values
enter unchanged, as their norms are factors of rows; everything else is the sum of two
numbers of that dtype, so that a product keeps about 16 bits of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.triton_recurrent_pieces import chunks_before, find_tile, split_request
from vllm.ops.cuda.triton_recurrent_step import gates


@triton.jit
def _split(x, dtype: tl.constexpr):
    """Two matrices of ``dtype`` whose sum is nearly the float32 matrix ``x``."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _dot(exact, factor):
    """``exact @ factor``; exact in the dtype of qkv, factor in float32."""
    high, low = _split(factor, exact.dtype)
    return tl.dot(exact, high, tl.dot(exact, low))


@triton.jit
def _dot_split(left_high, left_low, right):
    """``(left_high + left_low) @ right``; right in float32."""
    high, low = _split(right, left_high.dtype)
    product = tl.dot(left_low, high)
    product = tl.dot(left_high, low, product)
    return tl.dot(left_high, high, product)


@triton.jit
def _join_blocks(inverse, lower, size: tl.constexpr, chunk: tl.constexpr, dtype: tl.constexpr):
    """From the inverses of diagonal blocks of ``size`` to those of blocks twice as large."""
    row = tl.arange(0, chunk)[:, None] // size
    column = tl.arange(0, chunk)[None, :] // size
    below = tl.where((row % 2 == 1) & (column == row - 1), lower, 0.0)
    high, low = _split(inverse, dtype)
    left_high, left_low = _split(_dot_split(high, low, below), dtype)
    return inverse - _dot_split(left_high, left_low, inverse)


@triton.jit
def _unit_lower_inverse(lower, chunk: tl.constexpr, dtype: tl.constexpr):
    """Inverse of I + ``lower`` (strictly lower triangular).

    The 16 x 16 blocks on the diagonal by substitution, all at once; then pairs of blocks A,
    C with B below A: the inverse has -C^-1 B A^-1 there. No power of a matrix is formed:
    with equal keys those grow beyond what cancels in float32.
    """
    count: tl.constexpr = chunk // 16
    block = tl.arange(0, count)
    same = block[:, None, None, None] == block[None, None, :, None]
    # [block row, row, column] of the blocks on the diagonal
    diagonal = tl.sum(tl.where(same, tl.reshape(lower, (count, 16, count, 16)), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    inverse = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, tl.zeros_like(diagonal))
    for i in range(1, 16):
        weights = tl.sum(tl.where(row == i, diagonal, 0.0), 1)
        known = tl.sum(weights[:, :, None] * inverse, 1)
        inverse = tl.where(row == i, inverse - known[:, None, :], inverse)
    result = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (chunk, chunk))
    result = _join_blocks(result, lower, 16, chunk, dtype)
    return _join_blocks(result, lower, 32, chunk, dtype)


@triton.jit(do_not_specialize=["num_requests"])
def prepare_kernel(
    qkv,
    qkv_stride,
    a,
    a_stride,
    b,
    b_stride,
    a_log,
    dt_bias,
    squares,
    scales,
    query_start,
    seq_lens,
    num_requests,
    num_k_heads: tl.constexpr,
    num_v_heads: tl.constexpr,
    beta_scale: tl.constexpr,
    dk: tl.constexpr,
    scale: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
):
    """One chunk of one v-head. Writes, at [chunk, v-head]:

    squares [4, chunk, chunk], in qkv's dtype: high and low part of (I + L)^-1 diag(beta), then
    of the lower part of G * Q K^T. scales [4, chunk], float32: factors that take raw keys (in,
    out) and queries (in) to decayed and normalised ones; exp g.
    """
    request, index = find_tile(tl.program_id(0), query_start, seq_lens, num_requests, chunk, True)
    if request < num_requests:
        head = tl.program_id(1)
        begin = tl.load(query_start + request)
        end = tl.load(query_start + request + 1)
        before, _ = split_request(begin, end, tl.load(seq_lens + request), chunk)
        i = tl.arange(0, chunk)
        tokens = (begin + before + index * chunk + i).to(tl.int64)
        row = tl.arange(0, rows)
        mask = (row < dk)[None, :] & (tokens >= 0)[:, None]
        query = qkv + tokens[:, None] * qkv_stride + row[None, :]
        query += head // (num_v_heads // num_k_heads) * dk
        queries = tl.load(query, mask=mask, other=0.0)
        keys = tl.load(query + num_k_heads * dk, mask=mask, other=0.0)
        log_decay, beta = gates(
            tl.load(a + tokens * a_stride + head),
            tl.load(b + tokens * b_stride + head),
            tl.load(a_log + head),
            tl.load(dt_bias + head),
            beta_scale,
        )
        wide = queries.to(tl.float32)
        query_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
        wide = keys.to(tl.float32)
        key_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        below = i[:, None] > i[None, :]
        # Sums from column to row: differences of running sums would cancel after a small decay.
        spans = tl.cumsum(tl.where(below, log_decay[:, None], 0.0), 0)
        decays = tl.where(i[:, None] >= i[None, :], tl.exp(spans), 0.0)
        from_start = tl.exp(tl.cumsum(log_decay, 0))
        to_end = tl.sum(tl.where((i == chunk - 1)[:, None], decays, 0.0), 0)

        weighted = decays * key_scale[None, :]
        inner = tl.dot(keys, tl.trans(keys)) * weighted
        lower = tl.where(below, inner * (beta * key_scale)[:, None], 0.0)
        inverse = _unit_lower_inverse(lower, chunk, keys.dtype) * beta[None, :]
        inner = tl.dot(queries, tl.trans(keys)) * weighted

        slot = (tl.program_id(0) * num_v_heads + head).to(tl.int64)
        square = squares + slot * 4 * chunk * chunk + i[:, None] * chunk + i[None, :]
        high, low = _split(inverse, keys.dtype)
        tl.store(square, high)
        tl.store(square + chunk * chunk, low)
        high, low = _split(inner * query_scale[:, None], keys.dtype)
        tl.store(square + 2 * chunk * chunk, high)
        tl.store(square + 3 * chunk * chunk, low)
        vector = scales + slot * 4 * chunk + i
        tl.store(vector, from_start * key_scale)
        tl.store(vector + chunk, to_end * key_scale)
        tl.store(vector + 2 * chunk, from_start * query_scale)
        tl.store(vector + 3 * chunk, from_start)


@triton.jit
def scan_kernel(
    qkv,
    qkv_stride,
    squares,
    scales,
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
    dk: tl.constexpr,
    dv: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """The whole chunks of one request, for one v-head and ``columns`` of its state.

    A snapshot's block gets the state at the last chunk boundary that is not behind it.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    before, num_chunks = split_request(begin, end, tl.load(seq_lens + request), chunk)
    if num_chunks > 0:
        slot = chunks_before(request, query_start, seq_lens, chunk).to(tl.int64)
        slot = slot * num_v_heads + head
        i = tl.arange(0, chunk)
        row = tl.arange(0, rows)
        column = tl.program_id(2) * columns + tl.arange(0, columns)
        row_mask = (row < dk)[None, :]
        column_mask = (column < dv)[None, :]
        mask = (row < dk)[:, None] & column_mask
        first_token = begin + before
        token = qkv + (first_token + i)[:, None] * qkv_stride
        query = token + head // (num_v_heads // num_k_heads) * dk + row[None, :]
        value = token + 2 * num_k_heads * dk + head * dv + column[None, :]
        out_stride: tl.constexpr = num_v_heads * dv
        target = out + (first_token + i)[:, None] * out_stride + head * dv + column[None, :]
        own_block = tl.load(block_ids + request)
        known = (tl.load(has_states + request) != 0) | (before > 0)
        inner = head * head_stride + row[:, None] * row_stride + column[None, :]
        own = states + inner + own_block.to(tl.int64) * block_stride
        state = tl.load(own, mask=mask & known, other=0.0)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        done = num_chunks * 0  # 0, of the type of the counts
        for s in range(first, last + 1):  # the last time round: to the end, for its own block
            kept = tl.load(snapshot_tokens + s, mask=s < last, other=0)
            block = tl.load(snapshot_blocks + s, mask=s < last, other=0)
            kept = tl.where(s < last, kept - before, num_chunks * chunk)
            block = tl.where(s < last, block, own_block)
            until = tl.maximum(tl.minimum(kept // chunk, num_chunks), done)
            for c in range(done, until):
                step = c * chunk  # the chunk's first token
                place = slot + c * num_v_heads
                square = squares + place * 4 * chunk * chunk + i[:, None] * chunk + i[None, :]
                vector = scales + place * 4 * chunk
                keys = tl.load(
                    query + step * qkv_stride + num_k_heads * dk, mask=row_mask, other=0.0
                )
                queries = tl.load(query + step * qkv_stride, mask=row_mask, other=0.0)
                values = tl.load(value + step * qkv_stride, mask=column_mask, other=0.0)
                key_in = tl.load(vector + i)
                key_out = tl.load(vector + chunk + i)
                query_in = tl.load(vector + 2 * chunk + i)
                decay = tl.load(vector + 4 * chunk - 1)
                recalled = key_in[:, None] * _dot(keys, state)
                update = _dot_split(
                    tl.load(square),
                    tl.load(square + chunk * chunk),
                    values.to(tl.float32) - recalled,
                )
                rows_out = query_in[:, None] * _dot(queries, state)
                rows_out += _dot_split(
                    tl.load(square + 2 * chunk * chunk),
                    tl.load(square + 3 * chunk * chunk),
                    update,
                )
                state = decay * state + _dot(tl.trans(keys), key_out[:, None] * update)
                tl.store(
                    target + step * out_stride, rows_out.to(out.dtype.element_ty), mask=column_mask
                )
            done = until
            if (kept > 0) & (kept <= num_chunks * chunk):
                tl.store(states + inner + block.to(tl.int64) * block_stride, state, mask=mask)
