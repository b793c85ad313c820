"""The random order of an epoch."""

from __future__ import annotations

import zlib

import torch


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for an epoch. torch uses the lower 32 bits of a seed for a CPU."""
    return zlib.crc32(f"{seed} {epoch}".encode())


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the numbers below ``count`` in the order of an epoch."""
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
