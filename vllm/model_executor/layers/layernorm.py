"""Root-mean-square norms."""

from __future__ import annotations

from typing import ClassVar, overload

import torch
from torch import nn

from vllm.ops.norms import add_rms_norm, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    With a residual: the residual stream takes ``x`` (in place), then is normed; returns
    ``(normed, residual)``.
    """

    weight_offset: ClassVar[float] = 0.0
    """Added to the weight in the product."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        initial = torch.full(
            (hidden_size,), 1.0 - self.weight_offset, dtype=dtype or torch.get_default_dtype()
        )
        self.weight = nn.Parameter(initial, requires_grad=False)

    @overload
    def forward(self, x: torch.Tensor, residual: None = None) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x: [..., hidden_size]; with a residual both are [tokens, hidden_size]."""
        out = x.new_empty(x.shape)
        options = (self.weight, self.variance_epsilon, self.weight_offset, out)
        if residual is None:
            rms_norm(x, *options)
            return out
        add_rms_norm(x, residual, *options)
        return out, residual


class GemmaRMSNorm(RMSNorm):
    """The zero-centred form, ``x / rms(x) * (1 + weight)`` (Gemma, Qwen3.5)."""

    weight_offset = 1.0


class RMSNormGated(nn.Module):
    """``rms_norm(x) * silu(gate)`` per head, norm before gate (Qwen3.5 ``linear_attn.norm``)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.variance_epsilon = eps
        initial = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        self.weight = nn.Parameter(initial, requires_grad=False)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, n] dense; gate: the same shape, strided."""
        out = x.new_empty(x.shape)
        gated_rms_norm(x, gate, self.weight, self.variance_epsilon, out)
        return out
