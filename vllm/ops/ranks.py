"""Meetings of the processes of one machine, in memory that they share."""

from __future__ import annotations

import time

import torch

from vllm.ops.operation import Written, operation

ALL_THERE, LEFT, TIMED_OUT = range(3)


@operation
def meet_ranks(
    flags: torch.Tensor, rank: int, turn: int, microseconds: int, state: Written
) -> None:
    """Announce that ``rank`` has come to ``turn``, and wait for all others to come to it.

    What a rank wrote before it announced a turn is seen by those that meet it there.

    Args:
        flags: int64 [ranks + 1, 8], shared by all ranks: the turn to which each has come, and in
            the last row the last turn that will be answered with LEFT; the rest is unused.
        turn: higher than that of the call before.
        microseconds: the time after which it returns in any case, about.
        state: int64 [1]: ALL_THERE, LEFT or TIMED_OUT.

    The body relies on stores that are seen in their order, as on x86.
    """
    flags[rank, 0] = turn
    end, result = time.monotonic() + microseconds / 1e6, ALL_THERE
    while bool((flags[:-1, 0] < turn).any()):
        if int(flags[-1, 0]) >= turn:
            result = LEFT
            break
        if time.monotonic() >= end:
            result = TIMED_OUT
            break
        time.sleep(0)
    state.fill_(result)


@meet_ranks.contract
def _(flags: torch.Tensor, rank: int, state: torch.Tensor) -> None:
    assert flags.dtype == state.dtype == torch.int64 and flags.is_contiguous()
    assert flags.shape[1:] == (8,) and 0 <= rank < len(flags) - 1 and state.shape == (1,)
