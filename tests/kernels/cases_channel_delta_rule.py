"""Cases of the delta rule with decays by channel: odd sizes, strides, requests without tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


@cases
def channel_delta_rule(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    for heads, dk, dv in ((1, 8, 8), (3, 33, 20), (2, 64, 70), (1, 5, 1)):
        layout = make_layout([1, 40, 0, 17], [0, 9, 9, 0])
        snapshots = [[], [(16, 5), (33, 6)], [], [(17, 7)]]
        plan = make_plan([1, 2, 3, 4], [False, True, True, False], snapshots)
        qkv = strided(torch.randn(58, heads * (2 * dk + dv)).to(dtype))
        log_decays = -torch.exp(2 * torch.randn(58, heads * dk))
        b = strided(torch.randn(58, heads).to(dtype))
        b[3, 0], b[4, 0], log_decays[5, 0] = 60.0, -60.0, -200.0
        state = strided(torch.randn(8, heads, dk, dv))
        out = torch.full((58, heads, dv), math.nan, dtype=dtype)
        args = (qkv, log_decays, b, layout, plan, state, out)
        yield Case(args, tolerance, ("state_cache", "out"))
