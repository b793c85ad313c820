"""Recurrent layers on CUDA: ``gated_delta_rule``.

Float32 walks from token to token. Otherwise whole chunks of 64 tokens at absolute
positions go through chunked kernels (ours, or those of flash-linear-attention), and only
the tokens before and after them walk. So a prompt has the same bits for all cuts at
multiples of 64, and the tokens outside whole chunks have the same bits for any cuts. A
snapshot within a whole chunk is reached by a walk from the boundary below it. One at a
multiple of 64 costs nothing, and a request that resumes from it gets the same bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton

from vllm import envs
from vllm.ops import recurrent
from vllm.ops.cuda import cards, fla_recurrent
from vllm.ops.cuda.triton_recurrent_chunk import prepare_kernel, scan_kernel
from vllm.ops.cuda.triton_recurrent_pieces import CHUNK, DeltaRuleCall
from vllm.ops.cuda.triton_recurrent_step import step_kernel
from vllm.ops.cuda.triton_walk import tables_of

_STEP_COLUMNS = 16
"""Columns of a state that one program holds."""
_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200."""
_NO_CHUNK = 2**30
"""More tokens than any request has."""


@recurrent.gated_delta_rule.override("cuda")
def gated_delta_rule(*args: Any, **kwargs: Any) -> None:
    call = DeltaRuleCall(*args, **kwargs)
    assert not call.pending
    if call.qkv.dtype is torch.float32 or call.layout.max_query_len < CHUNK:
        _walk(call, "all")
    else:
        _walk(call, "before chunks")
        if envs.VLLM_GDN_BACKEND == "FLA":  # ``backends`` has checked that it can be used
            fla_recurrent.run_chunks(call)
        else:
            _run_chunks(call)
        _walk(call, "after chunks")


def _walk(call: DeltaRuleCall, part: Literal["all", "before chunks", "after chunks"]) -> None:
    _, num_v_heads, dk, dv = call.state_cache.shape
    states = call.states
    grid = (states.block_ids.shape[0], num_v_heads, triton.cdiv(dv, _STEP_COLUMNS))
    step_kernel[grid](
        *(call.qkv, call.qkv.stride(0), call.a, call.a.stride(0), call.b, call.b.stride(0)),
        *(call.a_log, call.dt_bias, call.out, call.state_cache, *call.state_cache.stride()[:3]),
        *tables_of(call.layout, states),
        num_k_heads=call.num_k_heads,
        num_v_heads=num_v_heads,
        beta_scale=call.beta_scale,
        dk=dk,
        dv=dv,
        scale=dk**-0.5,
        chunk=_NO_CHUNK if part == "all" else CHUNK,
        rows=triton.next_power_of_2(dk),
        columns=_STEP_COLUMNS,
        after_chunks=part == "after chunks",
        num_warps=1,
    )


def _run_chunks(call: DeltaRuleCall) -> None:
    _, num_v_heads, dk, dv = call.state_cache.shape
    layout, states = call.layout, call.states
    num_requests = states.block_ids.shape[0]
    most_chunks = call.qkv.shape[0] // CHUNK
    squares = call.qkv.new_empty((most_chunks, num_v_heads, 4, CHUNK, CHUNK))
    scales = call.qkv.new_empty((most_chunks, num_v_heads, 4, CHUNK), dtype=torch.float32)
    rows = max(16, triton.next_power_of_2(dk))
    prepare_kernel[(most_chunks, call.num_k_heads)](
        *(call.qkv, call.qkv.stride(0), call.a, call.a.stride(0), call.b, call.b.stride(0)),
        *(call.a_log, call.dt_bias, squares, scales),
        *(layout.query_start, layout.seq_lens, num_requests),
        num_k_heads=call.num_k_heads,
        num_v_heads=num_v_heads,
        beta_scale=call.beta_scale,
        dk=dk,
        scale=dk**-0.5,
        chunk=CHUNK,
        rows=rows,
        # Four warps of generation 10 take left factors from tensor memory, in which Triton has no
        # place for factors of 64 rows that change from turn to turn of a loop.
        num_warps=2 if cards.generation() == 10 else 4,
    )
    columns, num_warps = _scan_shape(min(num_requests, most_chunks) * num_v_heads, dv)
    grid = (num_requests, num_v_heads, triton.cdiv(dv, columns))
    scan_kernel[grid](
        *(call.qkv, call.qkv.stride(0), squares, scales, call.out),
        *(call.state_cache, *call.state_cache.stride()[:3], *tables_of(layout, states)),
        num_k_heads=call.num_k_heads,
        num_v_heads=num_v_heads,
        dk=dk,
        dv=dv,
        chunk=CHUNK,
        rows=rows,
        columns=columns,
        num_warps=num_warps,
        num_stages=2,
    )


def _scan_shape(num_states: int, dv: int) -> tuple[int, int]:
    """(columns of a state that a program holds, its warps), for so many states of ``dv`` columns.

    Each group of four warps does the same work, however many groups there are. Two groups in one
    program share what they load; if that would leave multiprocessors without a program, they are
    two programs.
    """
    if cards.generation() != 9:
        return 32, 4
    if dv <= 64 or num_states * triton.cdiv(dv, 64) <= _MULTIPROCESSORS:
        return 64, 4
    return 128, 8
