"""The recurrence of Mamba-2 in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import state_space
from vllm.ops.cuda.triton_recurrent_pieces import next_stop
from vllm.ops.cuda.triton_selective_scan import _softplus
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Of a head, for one program: few, so that a single long request fills the card."""


@triton.jit
def _head_scan_kernel(
    xbc,
    xbc_stride,
    dt,
    dt_stride,
    a_log,
    dt_bias,
    skip,
    out,
    states,
    block_stride,
    query_start,
    block_ids,
    has_states,
    snapshot_start,
    snapshot_tokens,
    snapshot_blocks,
    dt_min,
    dt_max,
    heads: tl.constexpr,
    groups: tl.constexpr,
    state_size: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One request, one head and ``columns`` of its columns."""
    request = tl.program_id(0)
    head = tl.program_id(2)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    entry = tl.arange(0, rows)
    inside = column < head_dim
    mask = (entry < state_size)[:, None] & inside[None, :]
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if begin < end:
        rate = -tl.exp(tl.load(a_log + head))
        bias = tl.load(dt_bias + head)
        passed = tl.load(skip + head)
        cells = states + (head * state_size + entry)[:, None] * head_dim + column[None, :]
        own_block = tl.load(block_ids + request)
        known = tl.load(has_states + request) != 0
        own = cells + own_block.to(tl.int64) * block_stride
        state = tl.load(own, mask=mask & known, other=0.0)
        key = xbc + heads * head_dim + head // (heads // groups) * state_size + entry
        value = xbc + head * head_dim + column
        result = out + head * head_dim + column
        first = tl.load(snapshot_start + request)
        last = tl.load(snapshot_start + request + 1)
        token = begin
        for i in range(first, last + 1):
            until, block = next_stop(
                i, last, begin, end, own_block, snapshot_tokens, snapshot_blocks
            )
            for t in range(token, until):
                x = tl.load(value + t * xbc_stride, mask=inside, other=0.0).to(tl.float32)
                b = tl.load(key + t * xbc_stride, mask=entry < state_size, other=0.0)
                c = tl.load(
                    key + t * xbc_stride + groups * state_size, mask=entry < state_size, other=0.0
                )
                step = _softplus(tl.load(dt + t * dt_stride + head).to(tl.float32) + bias)
                step = tl.minimum(tl.maximum(step, dt_min), dt_max)
                state *= tl.exp(rate * step)
                state += b.to(tl.float32)[:, None] * (step * x)[None, :]
                y = tl.sum(state * c.to(tl.float32)[:, None], 0) + passed * x
                y = y.to(out.dtype.element_ty)
                tl.store(result + t * (heads * head_dim), y, mask=inside)
            token = until
            tl.store(cells + block * block_stride, state, mask=mask)


@state_space.state_space_scan.override("cuda")
def state_space_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    num_groups: int,
    dt_min: float,
    dt_max: float,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, heads, state_size, head_dim = state_cache.shape
    grid = (states.block_ids.shape[0], triton.cdiv(head_dim, _COLUMNS), heads)
    _head_scan_kernel[grid](
        *(xbc, xbc.stride(0), dt, dt.stride(0), a_log, dt_bias, d, out),
        *(state_cache, state_cache.stride(0)),
        *(layout.query_start, states.block_ids, states.has_state),
        *(states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks),
        dt_min,
        dt_max,
        heads=heads,
        groups=num_groups,
        state_size=state_size,
        head_dim=head_dim,
        rows=triton.next_power_of_2(state_size),
        columns=_COLUMNS,
    )
