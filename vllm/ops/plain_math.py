"""Elementwise functions in float32 whose bits do not depend on the position of an element.

On the CPU, torch's own ``sigmoid``, ``silu`` and ``softplus`` use one formula for whole SIMD
vectors and another for the rest of an array. So the same number gives two results one unit
apart, depending on the size of the batch (measured with torch 2.13). ``exp`` and ``log1p`` do
not, and ``+ - * /`` are exact by IEEE 754.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` of a float32 tensor."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` of a float32 tensor."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` of a float32 tensor, without overflow."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
