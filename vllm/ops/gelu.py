"""The tanh form of GELU as a gate (GeGLU: Shazeer 2020; Hendrycks and Gimpel 2016)."""

from __future__ import annotations

import math

import torch

from vllm.ops.operation import Written, operation


@operation
def gelu_tanh_and_mul(x: torch.Tensor, out: Written) -> None:
    """``gelu(gate) * up``, gelu(g) = g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))).

    x: [tokens, 2n] as (gate | up), strided; out: [tokens, n], dense.
    """
    gate, up = x.float().chunk(2, dim=-1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    out.copy_(0.5 * gate * (1.0 + torch.tanh(inner)) * up)


@gelu_tanh_and_mul.contract
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    assert x.dim() == 2 and x.shape[0] == out.shape[0] and x.shape[1] == 2 * out.shape[1]
    assert x.dtype is out.dtype and x.stride(1) == 1 and out.is_contiguous()
