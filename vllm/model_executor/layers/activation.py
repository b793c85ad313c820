"""Activations between the products of an MLP."""

from __future__ import annotations

import torch
from torch import nn

from vllm.kernels import get_kernels


class SiluAndMul(nn.Module):
    """``silu(gate) * up``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 2n] as (gate | up) -> [tokens, n]."""
        return get_kernels(x.device.type).silu_and_mul(x)


def require_silu(activation: str, option: str = "hidden_act") -> None:
    """Raise unless the model's MLP uses SiLU, the one activation there is a kernel for."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"{option}={activation!r} is not supported; supported: 'silu'")
