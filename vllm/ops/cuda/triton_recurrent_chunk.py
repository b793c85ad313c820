"""The gated delta rule over whole chunks of tokens, in Triton.

Within a chunk of C tokens that starts from state S, with keys K, queries Q and values V as
rows, g the running sum of the log decays, G[i, j] = exp(g_i - g_j) and beta the gates, the
recurrence of the paper (Yang et al. 2024) unrolls to

    L = strictly lower part of beta_i G[i, j] (K K^T)[i, j]
    U = (I + L)^-1 diag(beta) (V - diag(exp g) K S)          what each token adds: K^T U
    O = diag(exp g) Q S + lower part of (G * Q K^T) U
    S' = exp(g_C) S + K^T diag(exp(g_C - g)) U

``prepare_kernel`` computes the parts that do not depend on S, for all chunks at once.
``scan_kernel`` walks over the chunks of a request. Both work on the transposes of all these
matrices: S, U and their products are then left factors, which a tensor core takes from the
registers that they were computed in.

Products run on tensor cores in bfloat16 or float16 with float32 sums. Queries, keys and values
enter unchanged, because their norms are factors of rows. Every other factor is the sum of two
numbers of that dtype, so that a product keeps about 16 bits of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.triton_recurrent_pieces import chunks_before, find_tile, split_request
from vllm.ops.cuda.triton_recurrent_step import gates
from vllm.ops.cuda.triton_walk import last_stop, next_stop


@triton.jit
def _split(x, dtype: tl.constexpr):
    """Two matrices of ``dtype`` whose sum is nearly the float32 matrix ``x``."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _dot(high, low, exact, start=None):
    """``start + (high + low) @ exact``."""
    return tl.dot(high, exact, tl.dot(low, exact, start))


@triton.jit
def _dot_split(high, low, right_high, right_low, start=None):
    """``start + (high + low) @ (right_high + right_low)`` without the product of both low parts."""
    product = tl.dot(high, right_low, start)
    return tl.dot(high, right_high, tl.dot(low, right_high, product))


@triton.jit
def _join_blocks(inverse, upper, row, column, size: tl.constexpr, dtype: tl.constexpr):
    """Turn the inverses of diagonal blocks of ``size`` into those of blocks twice as large."""
    right = tl.where((row // size % 2 == 0) & (column // size == row // size + 1), upper, 0.0)
    high, low = _split(inverse, dtype)
    right_high, right_low = _split(right, dtype)
    left_high, left_low = _split(_dot_split(high, low, right_high, right_low), dtype)
    return inverse - _dot_split(left_high, left_low, high, low)


@triton.jit
def _unit_upper_inverse(upper, chunk: tl.constexpr, dtype: tl.constexpr):
    """Inverse of I + ``upper`` (strictly upper triangular).

    For two blocks A and C on the diagonal with B to the right of A, the inverse has -A^-1 B C^-1 in
    the place of B. Blocks grow from one element to 16 for all 16 x 16 blocks on the diagonal at
    once, then for the whole matrix. No power of a matrix is formed: with equal keys powers grow
    too large to cancel in float32.
    """
    count: tl.constexpr = chunk // 16
    block = tl.arange(0, count)
    same = block[:, None, None, None] == block[None, None, :, None]
    # [block row, row, column] of the blocks on the diagonal
    diagonal = tl.sum(tl.where(same, tl.reshape(upper, (count, 16, count, 16)), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    pair = (row % 2 == 0) & (column == row + 1)
    inverse = tl.where(row == column, 1.0, tl.where(pair, -diagonal, 0.0))
    for power in tl.static_range(1, 4):
        inverse = _join_blocks(inverse, diagonal, row, column, 2**power, dtype)
    result = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (chunk, chunk))
    row = tl.arange(0, chunk)[:, None]
    column = tl.arange(0, chunk)[None, :]
    for power in tl.static_range(4, 6):
        result = _join_blocks(result, upper, row, column, 2**power, dtype)
    return result


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
    """One chunk of the v-heads of one k-head. Writes, at [chunk, v-head]:

    squares [4, chunk, chunk], in qkv's dtype: high and low part of (I + L)^-1 diag(beta), then
    of the lower part of G * Q K^T, all transposed. scales [4, chunk], float32: factors that turn
    raw keys (in, out) and queries (in) into decayed and normalised ones, then exp g.
    """
    request, index = find_tile(tl.program_id(0), query_start, seq_lens, num_requests, chunk, True)
    if request < num_requests:
        key_head = tl.program_id(1)
        group: tl.constexpr = num_v_heads // num_k_heads
        begin = tl.load(query_start + request)
        end = tl.load(query_start + request + 1)
        before, _ = split_request(begin, end, tl.load(seq_lens + request), chunk)
        i = tl.arange(0, chunk)
        tokens = (begin + before + index * chunk + i).to(tl.int64)
        row = tl.arange(0, rows)
        mask = (row < dk)[None, :] & (tokens >= 0)[:, None]
        query = qkv + tokens[:, None] * qkv_stride + key_head * dk + row[None, :]
        queries = tl.load(query, mask=mask, other=0.0)
        keys = tl.load(query + num_k_heads * dk, mask=mask, other=0.0)
        wide = queries.to(tl.float32)
        query_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
        wide = keys.to(tl.float32)
        key_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        cell = i[:, None] * chunk + i[None, :]
        after = i[None, :] > i[:, None]
        not_after = tl.where(i[:, None] <= i[None, :], 1.0, 0.0).to(tl.bfloat16)
        # Products of keys are the same for all heads, but are computed for each: if kept, they
        # would not fit into registers, nor would the values that the compiler hoists out of a loop.
        for head in tl.range(key_head * group, (key_head + 1) * group, disable_licm=True):
            log_decay, beta = gates(
                tl.load(a + tokens * a_stride + head),
                tl.load(b + tokens * b_stride + head),
                tl.load(a_log + head),
                tl.load(dt_bias + head),
                beta_scale,
            )
            # Sums from j to i, because differences of running sums would cancel after a small
            # decay. Three numbers of 8 bits are a float32.
            terms = tl.where(after, log_decay[None, :], 0.0)
            high = terms.to(tl.bfloat16)
            middle, low = _split(terms - high.to(tl.float32), tl.bfloat16)
            spans = tl.dot(high, not_after, tl.dot(middle, not_after, tl.dot(low, not_after)))
            decays = tl.where(i[:, None] <= i[None, :], tl.exp(spans), 0.0)
            from_start = tl.exp(tl.cumsum(log_decay, 0))
            to_end = tl.sum(tl.where((i == chunk - 1)[None, :], decays, 0.0), 1)

            slot = (tl.program_id(0) * num_v_heads + head).to(tl.int64)
            vector = scales + slot * 4 * chunk + i
            tl.store(vector, from_start * key_scale)
            tl.store(vector + chunk, to_end * key_scale)
            tl.store(vector + 2 * chunk, from_start * query_scale)
            tl.store(vector + 3 * chunk, from_start)
            square = squares + slot * 4 * chunk * chunk
            # [j, i]: the weight of token j in token i
            from_queries = tl.dot(keys, tl.trans(queries)) * key_scale[:, None]
            high, low = _split(from_queries * query_scale[None, :] * decays, keys.dtype)
            tl.store(square + 2 * chunk * chunk + cell, high)
            tl.store(square + 3 * chunk * chunk + cell, low)
            from_keys = tl.dot(keys, tl.trans(keys)) * key_scale[:, None]
            upper = tl.where(after, from_keys * decays * (beta * key_scale)[None, :], 0.0)
            inverse = _unit_upper_inverse(upper, chunk, keys.dtype) * beta[:, None]
            high, low = _split(inverse, keys.dtype)
            tl.store(square + cell, high)
            tl.store(square + chunk * chunk + cell, low)


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

    A snapshot's block gets the state at the last chunk boundary at or before it.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + request)
    end = tl.load(query_start + request + 1)
    before, num_chunks = split_request(begin, end, tl.load(seq_lens + request), chunk)
    if num_chunks > 0:
        slot = chunks_before(request, query_start, seq_lens, chunk).to(tl.int64)
        slot = slot * num_v_heads + head
        i = tl.arange(0, chunk)
        row = tl.arange(0, rows)
        column = tl.program_id(2) * columns + tl.arange(0, columns)
        row_mask = (row < dk)[None, :]
        column_mask = (column < dv)[:, None]
        mask = row_mask & column_mask  # [columns, rows]
        out_stride: tl.constexpr = num_v_heads * dv
        # Offsets have 32 bits and are the same for every chunk, so they stay in registers.
        token_row = i[:, None] * qkv_stride + row[None, :]
        value_row = i[:, None] * qkv_stride + column[None, :]
        out_row = i[None, :] * out_stride + column[:, None]
        cell = i[:, None] * chunk + i[None, :]
        first_token = (begin + before).to(tl.int64)
        token = qkv + first_token * qkv_stride
        square = squares + slot * (4 * chunk * chunk)
        vector = scales + slot * (4 * chunk)
        key_head = head // (num_v_heads // num_k_heads) * dk
        target = out + first_token * out_stride + head * dv
        own_block = tl.load(block_ids + request)
        known = (tl.load(has_states + request) != 0) | (before > 0)
        inner = row[None, :] * row_stride.to(tl.int32) + column[:, None]
        cells = states + head * head_stride
        own = cells + own_block.to(tl.int64) * block_stride
        state = tl.load(own + inner, mask=mask & known, other=0.0)
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        for s in range(first, last + 1):  # the last turn goes to the end, for its own block
            kept, block = next_stop(
                s, last, before + num_chunks * chunk, own_block, snapshot_tokens, snapshot_blocks
            )
            kept -= before
            known_chunks = tl.maximum(last_stop(s, first, snapshot_tokens) - before, 0) // chunk
            done = tl.minimum(known_chunks, num_chunks)
            until = tl.maximum(tl.minimum(kept // chunk, num_chunks), done)
            for _ in range(done, until):
                query = token + key_head
                keys = tl.load(query + num_k_heads * dk + token_row, mask=row_mask, other=0.0)
                queries = tl.load(query + token_row, mask=row_mask, other=0.0)
                value = token + (2 * num_k_heads * dk + head * dv)
                values = tl.load(value + value_row, mask=(column < dv)[None, :], other=0.0)
                query_in = tl.load(vector + 2 * chunk + i)
                decay = tl.load(vector + 4 * chunk - 1)
                inverse_high = tl.load(square + cell)
                inverse_low = tl.load(square + chunk * chunk + cell)
                inner_high = tl.load(square + 2 * chunk * chunk + cell)
                inner_low = tl.load(square + 3 * chunk * chunk + cell)

                high, low = _split(state, keys.dtype)
                recalled = _dot(high, low, tl.trans(keys))
                rows_out = _dot(high, low, tl.trans(queries))
                # Factors are loaded just before their use: loaded before the products of the state,
                # they would push addresses out of the registers.
                key_in = tl.load(vector + i)
                update = tl.dot(tl.trans(values), inverse_low)
                update = tl.dot(tl.trans(values), inverse_high, update)
                high, low = _split(-key_in[None, :] * recalled, keys.dtype)
                key_out = tl.load(vector + chunk + i)
                update = _dot_split(high, low, inverse_high, inverse_low, update)
                high, low = _split(key_out[None, :] * update, keys.dtype)
                state = _dot(high, low, keys, decay * state)
                # The output comes last, because nothing waits for it.
                high, low = _split(update, keys.dtype)
                rows_out = query_in[None, :] * rows_out
                rows_out = _dot_split(high, low, inner_high, inner_low, rows_out)
                tl.store(target + out_row, rows_out.to(out.dtype.element_ty), mask=column_mask)
                token += chunk * qkv_stride
                target += chunk * out_stride
                square += num_v_heads * 4 * chunk * chunk
                vector += num_v_heads * 4 * chunk
            if (kept > 0) & (kept <= num_chunks * chunk):
                tl.store(cells + block * block_stride + inner, state, mask=mask)
