"""States kept as rounded halves and the rest of their bits (``csrc/cpu/state_halves.h``).

No bit is lost on the way out and back in.
"""

from __future__ import annotations

import torch

_LOW, _HIGH, _HALF = 0xFFFF, -0x10000, 0x8000


def join_halves(stored: torch.Tensor) -> torch.Tensor:
    """Float32 [..., dk, dv] of a state that lies in halves: all of its bits."""
    words = stored.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    rounded, low = words[..., :pairs, :], words[..., pairs : 2 * pairs, :]
    plain = words.clone()
    plain[..., 0 : 2 * pairs : 2, :] = (rounded << 16) + ((low << 16) >> 16)
    plain[..., 1 : 2 * pairs : 2, :] = (rounded & _HIGH) + (low >> 16)
    return plain.view(torch.float32)


def part_halves(plain: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`join_halves`."""
    words = plain.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    upper, lower = words[..., 0 : 2 * pairs : 2, :], words[..., 1 : 2 * pairs : 2, :]
    stored = words.clone()
    stored[..., :pairs, :] = (((upper + _HALF) >> 16) & _LOW) | ((lower + _HALF) & _HIGH)
    stored[..., pairs : 2 * pairs, :] = (upper & _LOW) | (lower << 16)
    return stored.view(torch.float32)
