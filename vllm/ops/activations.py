"""Gates, an activation of one tensor times another; squared ReLU."""

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


@silu_and_mul.contract
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    assert x.dim() == 2 and x.shape[0] == out.shape[0] and x.shape[1] == 2 * out.shape[1]
    assert x.dtype is out.dtype and x.stride(1) == 1 and out.is_contiguous()


@operation
def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: Written) -> None:
    """``x * sigmoid(gate)``. x, gate: [tokens, heads, n], strided; out: the same, dense."""
    out.copy_(x.float() * sigmoid(gate.float()))


@sigmoid_gate.contract
def _(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    assert x.shape == gate.shape == out.shape and x.dtype is gate.dtype is out.dtype
    assert out.is_contiguous() and (x.shape[-1] <= 1 or x.stride(-1) == gate.stride(-1) == 1)


@operation
def silu_gate(x: torch.Tensor, gate: torch.Tensor, out: Written) -> None:
    """``x * silu(gate)``. x, gate: [tokens, heads, n], strided; out: the same, dense."""
    out.copy_(x.float() * silu(gate.float()))


@silu_gate.contract
def _(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    assert x.shape == gate.shape == out.shape and x.dtype is gate.dtype is out.dtype
    assert out.is_contiguous() and (x.shape[-1] <= 1 or x.stride(-1) == gate.stride(-1) == 1)


@operation
def relu_squared(x: torch.Tensor, out: Written) -> None:
    """``max(x, 0)^2`` (So et al. 2021). x: [tokens, n], strided; out: the same, dense."""
    out.copy_(x.float().clamp_min(0.0).square())


@relu_squared.contract
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    assert x.dim() == 2 and x.shape == out.shape and x.dtype is out.dtype
    assert (x.shape[1] <= 1 or x.stride(1) == 1) and out.is_contiguous()


@operation
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float, out: Written) -> None:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` (GPT-OSS), gate at most and |up| at most limit.

    x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    out.copy_((up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate))


@clamped_swiglu.contract
def _(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> None:
    assert x.dim() == 2 and x.shape[0] == out.shape[0] and x.shape[1] == 2 * out.shape[1]
    assert x.dtype is out.dtype and x.stride(1) == 1 and out.is_contiguous()
