"""Cases of the gated linear recurrence: odd sizes, strides, requests without tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import make_layout, make_plan, strided
from operation_cases import Case, cases


@cases
def gated_linear_recurrence(dtype: torch.dtype) -> Iterator[Case]:
    for channels in (8, 33, 1, 200):
        layout = make_layout([1, 40, 0, 17], [0, 9, 9, 0])
        snapshots = [[], [(16, 5), (33, 6)], [], [(17, 7)]]
        plan = make_plan([1, 2, 3, 4], [False, True, True, False], snapshots)
        x, input_gate, decay_gate = (strided(torch.randn(58, channels).to(dtype)) for _ in range(3))
        decay_gate[5, 0], decay_gate[6, 0], input_gate[7, 0] = 60.0, -4.0, -60.0
        rates, state = -torch.exp(torch.randn(channels)), strided(torch.randn(8, channels))
        out = torch.full((58, channels), math.nan, dtype=dtype)
        args = (x, input_gate, decay_gate, rates, layout, plan, state, out)
        yield Case(args, 1e-5, ("state_cache", "out"))
