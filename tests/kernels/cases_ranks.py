"""Cases of meetings of ranks, with the other ranks where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from operation_cases import Case, cases


@cases
def meet_ranks(dtype: torch.dtype) -> Iterator[Case]:
    for others, left in (((), 0), ((7,), 0), ((7, 6, 9), 3), ((6, 5), 0), ((5, 8), 6), ((5,), 5)):
        flags = torch.tensor([2, *others, left])[:, None] * torch.tensor([1] + [0] * 7)
        state = torch.full((1,), -1)
        yield Case((flags.contiguous(), 0, 6, 1000, state), 0.0, ("flags", "state"))
