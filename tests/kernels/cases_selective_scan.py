"""Cases of Mamba's selective scan: odd sizes, groups, strides, requests without tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


@cases
def selective_scan(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    for channels, groups, state_size in ((8, 1, 16), (33, 1, 5), (200, 2, 13), (70, 1, 1)):
        layout = make_layout([1, 40, 0, 17], [0, 9, 9, 0])
        snapshots = [[], [(16, 5), (33, 6)], [], [(17, 7)]]
        plan = make_plan([1, 2, 3, 4], [False, True, True, False], snapshots)
        x, step, gate = (strided(torch.randn(58, channels).to(dtype)) for _ in range(3))
        step[3, 0], step[4, 0], gate[5, 0], gate[6, 0] = 60.0, -60.0, 60.0, -60.0
        b, c = (strided(torch.randn(58, groups, state_size).to(dtype)) for _ in range(2))
        rates = -torch.exp(torch.randn(state_size, channels))
        step_bias, skip = torch.randn(2, channels)
        state = strided(torch.randn(8, state_size, channels))
        args = (x, step, b, c, gate, rates, step_bias, skip, layout, plan, state)
        out = torch.full((58, channels), math.nan, dtype=dtype)
        yield Case((*args, out), tolerance, ("state_cache", "out"))
