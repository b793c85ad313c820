"""Cases of RWKV-4's weighted mean: odd sizes, strides, requests without tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


@cases
def wkv(dtype: torch.dtype) -> Iterator[Case]:
    for channels in (8, 33, 1, 200):
        layout = make_layout([1, 40, 0, 17], [0, 9, 9, 0])
        snapshots = [[], [(16, 5), (33, 6)], [], [(17, 7)]]
        plan = make_plan([1, 2, 3, 4], [False, True, True, False], snapshots)
        key, value, receptance = (strided(torch.randn(58, channels).to(dtype)) for _ in range(3))
        key[5, 0], key[6, 0], key[20, 0], receptance[7, 0] = 150.0, -150.0, 60.0, -60.0
        log_decay, bonus = -torch.exp(torch.randn(channels)), torch.randn(channels)
        log_decay[0] = -1e-4
        state = strided(torch.rand(8, 3, channels) + 0.5)
        out = torch.full((58, channels), math.nan, dtype=dtype)
        args = (key, value, receptance, log_decay, bonus, layout, plan, state, out)
        yield Case(args, 1e-5, ("state_cache", "out"))
