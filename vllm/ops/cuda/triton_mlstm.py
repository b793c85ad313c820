"""The mLSTM in Triton, token by token: bits do not depend on where steps end.

One kernel walks over gates, stabiliser and normaliser of each head, and writes three factors per
token. Another kernel walks over the memory; each of its programs has some of the columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import mlstm as xlstm
from vllm.ops.cuda.triton_walk import read, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Columns of a memory in one program."""


@triton.jit
def _capped(gate, cap):
    """cap tanh(gate / cap) of one number."""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * gate / cap)) - 1.0)


@triton.jit
def _take_gates(state, t, inputs):
    qkv, gates, factors, places, constants = inputs
    heads, head, query, key, inside = places
    cap, scale, epsilon = constants
    n, m = state
    q = read(qkv, t, query, inside)
    k = read(qkv, t, key, inside)
    write_gate = _capped(read(gates, t, head, True), cap)
    forget = _capped(read(gates, t, heads + head, True), cap)
    faded = m + tl.minimum(forget, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(forget)))
    m = tl.maximum(faded, write_gate)
    kept = tl.exp(faded - m)
    added = tl.exp(write_gate - m)
    n = kept * n + added * k
    size = tl.maximum(tl.abs(tl.sum(n * q, 0)) * scale, tl.exp(-m)) + epsilon
    write(factors, t, head * 3, True, kept)
    write(factors, t, head * 3 + 1, True, added)
    write(factors, t, head * 3 + 2, True, scale / size)
    return n, m


@triton.jit
def _mlstm_gates_kernel(
    qkv,
    gates,
    factors,
    normaliser,
    stabiliser,
    tables,
    cap: tl.constexpr,
    epsilon: tl.constexpr,
    heads: tl.constexpr,
    dk: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
):
    """One request and one head."""
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    query, inside = head * dk + row, row < dk
    places = (heads, head, query, heads * dk + query, inside)
    inputs = (qkv, gates, factors, places, (cap, scale, epsilon))
    stride, head_stride = normaliser.strides
    n = (normaliser.cells + head * head_stride + row, stride, inside, 0.0)
    m = (stabiliser.cells + head, stabiliser.strides[0], True, 0.0)
    walk(_take_gates, inputs, (n, m), tables)


@triton.jit
def _take_memory(state, t, inputs):
    qkv, factors, out, places, in_row, in_column = inputs
    head, query, key, value, target = places
    (memory,) = state  # [dk, dv]
    q = read(qkv, t, query, in_row)
    k = read(qkv, t, key, in_row)
    v = read(qkv, t, value, in_column)
    added = v * read(factors, t, head * 3 + 1, True)
    memory = read(factors, t, head * 3, True) * memory + k[:, None] * added[None, :]
    result = tl.sum(memory * q[:, None], 0) * read(factors, t, head * 3 + 2, True)
    write(out, t, target, in_column, result)
    return (memory,)


@triton.jit
def _mlstm_memory_kernel(
    qkv,
    factors,
    out,
    memory,
    tables,
    heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """One request, one head and ``columns`` of its memory."""
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    in_row, in_column = row < dk, column < dv
    query, target = head * dk + row, head * dv + column
    places = (head, query, heads * dk + query, 2 * heads * dk + target, target)
    inputs = (qkv, factors, out, places, in_row, in_column)
    stride, head_stride, row_stride = memory.strides
    cells = memory.cells + head * head_stride + row[:, None] * row_stride + column[None, :]
    inside = in_row[:, None] & in_column[None, :]
    walk(_take_memory, inputs, ((cells, stride, inside, 0.0),), tables)


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
    factors = strided(torch.empty((len(qkv), heads, 3), dtype=torch.float32, device=qkv.device))
    tables = tables_of(layout, states)
    _mlstm_gates_kernel[requests, heads](
        *(strided(qkv), strided(gates), factors),
        *(strided(normaliser_cache), strided(stabiliser_cache), tables),
        cap=gate_cap,
        epsilon=epsilon,
        heads=heads,
        dk=dk,
        scale=dk**-0.5,
        rows=rows,
    )
    _mlstm_memory_kernel[requests, heads, triton.cdiv(dv, _COLUMNS)](
        *(strided(qkv), factors, strided(out), strided(memory_cache), tables),
        heads=heads,
        dk=dk,
        dv=dv,
        rows=rows,
        columns=_COLUMNS,
    )
