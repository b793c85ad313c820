"""The delta rule with decays by channel in Triton, token by token.

Bits do not depend on where steps end.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import channel_delta_rule as rule
from vllm.ops.cuda.triton_walk import read, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Columns of a state in one program."""


@triton.jit
def _take(state, t, inputs):
    qkv, log_decays, b, out, scale, places, in_row, in_column = inputs
    head, query, key, value, target = places
    (memory,) = state  # [dk, dv]
    q = read(qkv, t, query, in_row)
    k = read(qkv, t, key, in_row)
    v = read(qkv, t, value, in_column)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    memory *= tl.exp(read(log_decays, t, query, in_row))[:, None]
    beta = 1.0 / (1.0 + tl.exp(-read(b, t, head, True)))
    update = beta * (v - tl.sum(memory * k[:, None], 0))
    memory += k[:, None] * update[None, :]
    write(out, t, target, in_column, tl.sum(memory * q[:, None], 0))
    return (memory,)


@triton.jit
def _delta_kernel(
    qkv,
    log_decays,
    b,
    out,
    states,
    tables,
    heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One request, one head and ``columns`` of its state."""
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    in_row, in_column = row < dk, column < dv
    query, target = head * dk + row, head * dv + column
    places = (head, query, heads * dk + query, 2 * heads * dk + target, target)
    inputs = (qkv, log_decays, b, out, scale, places, in_row, in_column)
    stride, head_stride, row_stride = states.strides
    cells = states.cells + head * head_stride + row[:, None] * row_stride + column[None, :]
    inside = in_row[:, None] & in_column[None, :]
    walk(_take, inputs, ((cells, stride, inside, 0.0),), tables)


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
        *(strided(qkv), strided(log_decays), strided(b), strided(out)),
        *(strided(state_cache), tables_of(layout, states)),
        heads=heads,
        dk=dk,
        dv=dv,
        scale=dk**-0.5,
        rows=triton.next_power_of_2(dk),
        columns=_COLUMNS,
    )
