"""Cases of Mamba-2: the recurrence, the norms and gates behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


def _nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@cases
def state_space_scan(dtype: torch.dtype) -> Iterator[Case]:
    """Requests that begin, that go on, one without tokens; states lie apart, some are kept."""
    sizes = [(1, 1, 1, 1), (4, 2, 16, 16), (6, 1, 33, 20), (3, 3, 7, 72), (10, 2, 4, 64)]
    for heads, groups, state_size, head_dim in sizes:
        layout = make_layout([1, 40, 0, 17, 2], [0, 0, 9, 31, 5])
        plan = make_plan(
            [1, 2, 3, 4, 8],
            [False, False, True, True, True],
            [[], [(16, 5), (33, 6)], [], [(17, 7)], []],
        )
        xbc = strided(torch.randn(60, heads * head_dim + 2 * groups * state_size).to(dtype))
        dt = strided(torch.randn(60, heads).to(dtype))
        a_log, dt_bias, d = torch.randn(3, heads)
        pool = torch.randn(9, 2, heads, state_size, head_dim)
        pool[[1, 2, 3, 5, 6, 7]] = math.nan
        for limits in ((0.0, math.inf), (0.3, 0.9)):
            args = (xbc, dt, a_log, dt_bias, d, groups, *limits, layout, plan, pool[:, 1], [])
            out = _nan(60, heads, head_dim, dtype=dtype)
            yield Case((*args, out), 2e-6, ("state_cache", "out"))


@cases
def group_gated_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 2e-6 if dtype is torch.float32 else 2**-8
    for shape in ((0, 2, 8), (1, 1, 1), (3, 4, 33), (17, 1, 100), (5, 3, 256)):
        x, gate = strided(torch.randn(shape).to(dtype)), strided(torch.randn(shape).to(dtype))
        weight = torch.randn(shape[1:]).to(dtype)
        for gates_first in (False, True):
            out = _nan(*shape, dtype=dtype)
            yield Case((x, gate, weight, 1e-5, gates_first, out), tolerance)


@cases
def silu_gate(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((0, 2, 8), (1, 1, 1), (3, 4, 33), (17, 1, 100)):
        x, gate = torch.randn(shape).to(dtype), strided(torch.randn(shape).to(dtype))
        yield Case((x, gate, _nan(*shape, dtype=dtype)), 3e-6)
