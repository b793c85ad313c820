"""GELU in its two forms, alone and as a gate (Hendrycks and Gimpel 2016; GeGLU: Shazeer 2020)."""

from __future__ import annotations

import math

import torch

from vllm.ops.activations import of_halves, of_rows
from vllm.ops.operation import Written, operation


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """``x / 2 (1 + erf(x / sqrt(2)))`` of a float32 tensor."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` of a float32 tensor."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


@operation
def gelu(x: torch.Tensor, out: Written) -> None:
    """``x / 2 (1 + erf(x / sqrt(2)))``. x: [tokens, n], strided; out: [tokens, n], dense."""
    out.copy_(_gelu(x.float()))


@operation
def gelu_tanh(x: torch.Tensor, out: Written) -> None:
    """The form with tanh. x: [tokens, n], strided; out: [tokens, n], dense."""
    out.copy_(_gelu_tanh(x.float()))


@operation
def gelu_and_mul(x: torch.Tensor, out: Written) -> None:
    """``gelu(gate) * up``. x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense."""
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(_gelu(gate) * up)


@operation
def gelu_tanh_and_mul(x: torch.Tensor, out: Written) -> None:
    """``gelu_tanh(gate) * up``.

    x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense.
    """
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(_gelu_tanh(gate) * up)


gelu.contract(of_rows)
gelu_tanh.contract(of_rows)
gelu_and_mul.contract(of_halves)
gelu_tanh_and_mul.contract(of_halves)
