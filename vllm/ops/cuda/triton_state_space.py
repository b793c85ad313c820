"""The recurrence of Mamba-2 in Triton, token by token: bits do not depend on where steps end."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm.ops import state_space
from vllm.ops.cuda.triton_walk import read, softplus, strided, tables_of, walk, write
from vllm.ops.layout import SequenceLayout, StatePlan

_COLUMNS = 32
"""Columns of a head in one program: few, so that a single long request fills the card."""


@triton.jit
def _take(state, t, inputs):
    xbc, dt, out, places, inside, in_entry, constants = inputs
    head, values, keys, queries = places
    rate, bias, passed, dt_min, dt_max = constants
    (memory,) = state  # [state size, head dim]
    x = read(xbc, t, values, inside)
    b = read(xbc, t, keys, in_entry)
    c = read(xbc, t, queries, in_entry)
    step = softplus(read(dt, t, head, True) + bias)
    step = tl.minimum(tl.maximum(step, dt_min), dt_max)
    memory *= tl.exp(rate * step)
    memory += b[:, None] * (step * x)[None, :]
    write(out, t, values, inside, tl.sum(memory * c[:, None], 0) + passed * x)
    return (memory,)


@triton.jit
def _head_scan_kernel(
    xbc,
    dt,
    a_log,
    dt_bias,
    skip,
    out,
    states,
    tables,
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
    head = tl.program_id(2)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    entry = tl.arange(0, rows)
    inside, in_entry = column < head_dim, entry < state_size
    keys = heads * head_dim + head // (heads // groups) * state_size + entry
    places = (head, head * head_dim + column, keys, keys + groups * state_size)
    rate = -tl.exp(tl.load(a_log + head))
    constants = (rate, tl.load(dt_bias + head), tl.load(skip + head), dt_min, dt_max)
    inputs = (xbc, dt, out, places, inside, in_entry, constants)
    cells = states.cells + (head * state_size + entry)[:, None] * head_dim + column[None, :]
    mask = in_entry[:, None] & inside[None, :]
    walk(_take, inputs, ((cells, states.strides[0], mask, 0.0),), tables)


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
    pending: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    assert not pending
    _, heads, state_size, head_dim = state_cache.shape
    grid = (states.block_ids.shape[0], triton.cdiv(head_dim, _COLUMNS), heads)
    _head_scan_kernel[grid](
        *(strided(xbc), strided(dt), a_log, dt_bias, d, strided(out)),
        *(strided(state_cache), tables_of(layout, states), dt_min, dt_max),
        heads=heads,
        groups=num_groups,
        state_size=state_size,
        head_dim=head_dim,
        rows=triton.next_power_of_2(state_size),
        columns=_COLUMNS,
    )
