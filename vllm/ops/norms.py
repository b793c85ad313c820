"""Norms of rows: root mean square (Zhang and Sennrich 2019), layer norm (Ba et al. 2016).

``epsilon`` is added to the mean square. With ``offset`` 0 the normalised value is rounded to the
dtype before it is multiplied by the weight (Llama). With another offset (1.0 is the zero-centred
form of Qwen3.5 and Gemma) the product with ``weight + offset`` is formed in float32 and rounded
once.
"""

from __future__ import annotations

import torch

from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import silu


@operation
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, offset: float, out: Written
) -> None:
    """``x / rms(x) * (weight + offset)`` over the last dimension; weight None: ``x / rms(x)``.

    x: [tokens, n] or [tokens, heads, n], strided; weight: [n]; out: like x, dense.
    """
    # Dense rows, so that a reduction is the same work for every row.
    rows = x.float().contiguous()
    mean_square = (rows * rows).sum(dim=-1, keepdim=True) / x.shape[-1]
    normalised = rows * torch.rsqrt(mean_square + epsilon)
    if weight is not None:
        if offset == 0.0:
            normalised = normalised.to(x.dtype).float() * weight.float()
        else:
            normalised = normalised * (weight.float() + offset)
    out.copy_(normalised)


@rms_norm.contract
def _(x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor) -> None:
    assert x.dtype is out.dtype and x.shape == out.shape and out.is_contiguous()
    assert x.stride(-1) == 1 or x.shape[-1] <= 1
    assert weight is None or (weight.dtype is x.dtype and weight.is_contiguous())


@operation
def add_rms_norm(
    x: torch.Tensor,
    residual: Written,
    weight: torch.Tensor,
    epsilon: float,
    offset: float,
    out: Written,
) -> None:
    """``residual += x`` (rounded to its dtype), then its :func:`rms_norm`. All [tokens, n]."""
    residual.add_(x)
    rms_norm.body(residual, weight, epsilon, offset, out)


@add_rms_norm.contract
def _of_stream(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    assert x.dim() == 2 and x.shape == residual.shape == out.shape and out.is_contiguous()
    assert x.dtype is residual.dtype is weight.dtype is out.dtype and weight.is_contiguous()
    assert x.shape[1] <= 1 or x.stride(1) == residual.stride(1) == 1


@operation
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, out: Written
) -> None:
    """``rms_norm(x, weight) * silu(gate)``, norm before gate (Qwen3.5 ``linear_attn.norm``).

    x, out: [tokens, heads, n]; gate: the same, possibly a slice of a wider projection. The product
    with the gate is formed in float32 and rounded once; out is dense.
    """
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    rms_norm.body(x, weight, epsilon, 0.0, normed)
    out.copy_(normed.float() * silu(gate.float()))


@gated_rms_norm.contract
def _(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    assert x.shape == gate.shape == out.shape and out.is_contiguous() and weight.is_contiguous()
    assert x.dtype is gate.dtype is weight.dtype is out.dtype
    assert x.shape[-1] <= 1 or x.stride(-1) == gate.stride(-1) == 1


@operation
def group_gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    gates_first: bool,
    out: Written,
) -> None:
    """``rms_norm(x * silu(gate)) * weight`` group by group (Mamba-2), or the norm before the gate.

    x, gate: [tokens, groups, n], strided; weight: [groups, n]; out: like x, dense. Everything is
    computed in float32 and rounded once.
    """
    rows, gates = x.float().contiguous(), silu(gate.float())
    if gates_first:
        rows = rows * gates
    mean_square = (rows * rows).sum(dim=-1, keepdim=True) / x.shape[-1]
    normalised = rows * torch.rsqrt(mean_square + epsilon) * weight.float()
    out.copy_(normalised if gates_first else normalised * gates)


@group_gated_rms_norm.contract
def _(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    assert x.dim() == 3 and x.shape == gate.shape == out.shape and out.is_contiguous()
    assert x.dtype is gate.dtype is weight.dtype is out.dtype
    assert weight.shape == x.shape[1:] and weight.is_contiguous()
    assert x.shape[-1] <= 1 or x.stride(-1) == gate.stride(-1) == 1


@operation
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    out: Written,
) -> None:
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dimension.

    x: [tokens, n] or [tokens, heads, n], strided; weight: [n], or [heads, n] if each head has its
    own; bias: [n]; out: like x, dense. Everything is computed in float32 and rounded once.
    """
    rows = x.float().contiguous()
    size = x.shape[-1]
    centred = rows - rows.sum(dim=-1, keepdim=True) / size
    variance = (centred * centred).sum(dim=-1, keepdim=True) / size
    normalised = centred * torch.rsqrt(variance + epsilon) * weight.float()
    out.copy_(normalised if bias is None else normalised + bias.float())


@layer_norm.contract
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    assert x.dtype is out.dtype is weight.dtype and x.shape == out.shape and out.is_contiguous()
    assert x.stride(-1) == 1 or x.shape[-1] <= 1
    assert weight.is_contiguous() and weight.shape in (x.shape[-1:], x.shape[1:])
    assert bias is None or (bias.shape == x.shape[-1:] and bias.is_contiguous())


@operation
def add_layer_norm(
    x: torch.Tensor,
    residual: Written,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    out: Written,
) -> None:
    """``residual += x`` (rounded to its dtype), then its :func:`layer_norm`. All [tokens, n]."""
    residual.add_(x)
    layer_norm.body(residual, weight, bias, epsilon, out)


@add_layer_norm.contract
def _(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    _of_stream(x, residual, weight, out)
    assert bias is None or (bias.shape == weight.shape and bias.is_contiguous())
