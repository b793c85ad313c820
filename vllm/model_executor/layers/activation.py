"""Activations between the products of an MLP."""

from __future__ import annotations

import torch
from torch import nn

from vllm.ops.activations import silu_and_mul


class SiluAndMul(nn.Module):
    """``silu(gate) * up``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 2n] as (gate | up) -> [tokens, n]."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        silu_and_mul(x, out)
        return out


def require_silu(activation: str, option: str = "hidden_act") -> None:
    """Raise unless the model's MLP uses SiLU, the one activation there is a kernel for."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"{option}={activation!r} is not supported; supported: 'silu'")
