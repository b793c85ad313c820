"""Properties of the card by which kernels choose their tiles; without a card, those of Hopper."""

from __future__ import annotations

import functools

import torch


@functools.cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def generation() -> int:
    """The card's generation: 9 for Hopper, whose four warps multiply 64 rows at once, from
    registers."""
    return _capability()[0]


def has_small_memory() -> bool:
    """Return whether a program has only 99 KiB of shared memory, as on desktop cards (sm_86, 89,
    120)."""
    return _capability() in ((8, 6), (8, 9)) or generation() == 12
