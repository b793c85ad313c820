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


def _cells() -> torch.Tensor:
    return torch.arange(24).view(3, 8)


@cases
def tell_processes(dtype: torch.dtype) -> Iterator[Case]:
    for row, value in ((0, 7), (2, 2**40 + 1)):
        yield Case((_cells(), row, value, torch.full((1,), -1)), 0.0, ("cells", "woken"))


@cases
def wait_for_change(dtype: torch.dtype) -> Iterator[Case]:
    for row, seen in ((0, 0), (1, 7), (2, 16)):  # of the first and the last, time runs out
        yield Case((_cells(), row, seen, 1000, torch.full((1,), -1)), 0.0, ("value",))
