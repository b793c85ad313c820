"""Gates (an activation of one tensor times another) and plain activations."""

from __future__ import annotations

import torch

from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import sigmoid, silu


@operation
def silu_and_mul(x: torch.Tensor, out: Written) -> None:
    """``silu(gate) * up`` (SwiGLU, Shazeer 2020).

    x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense.
    """
    gate, up = x.chunk(2, dim=-1)
    out.copy_(silu(gate.float()) * up.float())


@operation
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: Written) -> None:
    """``x * sigmoid(gate)``. x, gate: [tokens, heads, n], strided; out: the same, dense."""
    out.copy_(x.float() * sigmoid(gate.float()))


@operation
def silu_gate(x: torch.Tensor, gate: torch.Tensor, out: Written) -> None:
    """``x * silu(gate)``. x, gate: [tokens, heads, n], strided; out: the same, dense."""
    out.copy_(x.float() * silu(gate.float()))


@operation
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float, out: Written) -> None:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` (GPT-OSS), gate at most and |up| at most limit.

    x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    out.copy_((up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate))


@operation
def relu_squared(x: torch.Tensor, out: Written) -> None:
    """``max(x, 0)^2`` (So et al. 2021). x: [tokens, n], strided; out: [tokens, n], dense."""
    positive = x.float().clamp_min(0.0)
    out.copy_(positive * positive)


@operation
def xielu(
    x: torch.Tensor, positive: float, negative: float, beta: float, epsilon: float, out: Written
) -> None:
    """``positive x^2 + beta x`` above 0, ``negative (e^min(x, epsilon) - 1 - x) + beta x`` below.

    epsilon: a number just below 0. x: [tokens, n], strided; out: [tokens, n], dense. Source: arXiv
    2411.13010.
    """
    wide = x.float()
    below = negative * (torch.expm1(wide.clamp_max(epsilon)) - wide)
    out.copy_(torch.where(wide > 0, positive * wide * wide, below) + beta * wide)


@relu_squared.contract
@xielu.contract
def of_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of operations that turn [tokens, n] into [tokens, n]."""
    assert x.dim() == 2 and x.shape == out.shape and x.dtype is out.dtype
    assert out.is_contiguous() and (x.shape[1] <= 1 or x.stride(1) == 1)


@silu_and_mul.contract
@clamped_swiglu.contract
def of_halves(x: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of operations that turn [tokens, 2n] into [tokens, n]."""
    assert x.dim() == 2 and x.shape[0] == out.shape[0] and x.shape[1] == 2 * out.shape[1]
    assert x.dtype is out.dtype and x.stride(1) == 1 and out.is_contiguous()


@sigmoid_gate.contract
@silu_gate.contract
def _of_heads(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    assert x.shape == gate.shape == out.shape and x.dtype is gate.dtype is out.dtype
    assert out.is_contiguous() and (x.shape[-1] <= 1 or x.stride(-1) == gate.stride(-1) == 1)
