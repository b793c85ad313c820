"""Cases of the mLSTM: odd sizes, strides, gates at their caps, requests without tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


@cases
def mlstm(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    for heads, dk, dv in ((1, 8, 8), (3, 33, 20), (2, 64, 70), (1, 5, 1)):
        layout = make_layout([1, 40, 0, 17], [0, 9, 9, 0])
        snapshots = [[], [(16, 5), (33, 6)], [], [(17, 7)]]
        plan = make_plan([1, 2, 3, 4], [False, True, True, False], snapshots)
        qkv = strided(torch.randn(58, heads * (2 * dk + dv)).to(dtype))
        gates = strided(torch.randn(58, 2 * heads).to(dtype) * 3)
        gates[3, 0], gates[4, 0], gates[9, heads], gates[20, heads] = 60.0, -60.0, 60.0, -60.0
        memory = strided(torch.randn(8, heads, dk, dv))
        normaliser, stabiliser = strided(torch.randn(8, heads, dk)), strided(torch.randn(8, heads))
        out = torch.full((58, heads, dv), math.nan, dtype=dtype)
        args = (qkv, gates, 15.0, 1e-6, layout, plan, memory, normaliser, stabiliser, out)
        written = ("memory_cache", "normaliser_cache", "stabiliser_cache", "out")
        yield Case(args, tolerance, written)
