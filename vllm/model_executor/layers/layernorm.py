"""Norms of the residual stream, and of query and key heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, overload

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.model_executor.utils import make_parameter, set_weight_attrs
from vllm.ops.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm


class RMSNorm(Layer):
    """``x / rms(x) * weight`` over the last dimension.

    With a residual: ``x`` is added to the residual stream in place, and the sum is normed; returns
    ``(normed, residual)``. Without a weight (then there is no residual): ``x / rms(x)``.
    """

    weight_offset: ClassVar[float] = 0.0
    """Number that is added to the weight in the product."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        *,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = 1.0 * eps  # what is no number fails here
        self.weight: nn.Parameter | None = None
        if has_weight:
            initial = torch.full(
                (hidden_size,), 1.0 - self.weight_offset, dtype=dtype or torch.get_default_dtype()
            )
            self.weight = make_parameter(initial)

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
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        options = (self.variance_epsilon, self.weight_offset, out)
        if residual is None:
            rms_norm(x, self.weight, *options)
            return out
        assert self.weight is not None
        add_rms_norm(x, residual, self.weight, *options)
        return out, residual


class Float32StreamRMSNorm(RMSNorm):
    """The norm of a float32 stream in a model of another dtype.

    rounds_first: the stream is rounded to the model's dtype before the norm, not only after it.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, rounds_first: bool = False) -> None:
        super().__init__(hidden_size, eps)
        self.rounds_first = rounds_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: [..., hidden_size], float32 or the weight's dtype -> the weight's dtype."""
        assert self.weight is not None
        dtype = self.weight.dtype
        if self.rounds_first or x.dtype is dtype:
            return super().forward(x.to(dtype))
        out = torch.empty_like(x)
        rms_norm(x, self.weight.float(), self.variance_epsilon, self.weight_offset, out)
        return out.to(dtype)


class GemmaRMSNorm(RMSNorm):
    """The zero-centred form, ``x / rms(x) * (1 + weight)`` (Gemma, Qwen3.5)."""

    weight_offset = 1.0


class WideRMSNorm(RMSNorm):
    """One norm over all heads of a token (OLMo 2's queries and keys), those of all ranks."""

    @classmethod
    def over_heads(cls, eps: float) -> Callable[[HeadSlice, int], WideRMSNorm]:
        """Return a function that makes the norm for a rank's heads and their size."""

        def make(heads: HeadSlice, size: int) -> WideRMSNorm:
            norm = cls(heads.count * size, eps=eps)
            assert norm.weight is not None
            set_weight_attrs(norm.weight, {"weight_loader": heads.load})
            return norm

        return make

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[tokens, heads, n], heads * n = hidden_size -> the same shape."""
        rows = x.flatten(1)
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return super().forward(rows).view(x.shape)
        assert self.weight is not None and self.weight_offset == 0.0
        values = rows.float()
        squares = ranks.all_reduce(values.square().sum(-1, keepdim=True))
        # Heads that several ranks hold count as often in both.
        mean_square = squares / (self.hidden_size * ranks.world_size)
        normalised = (values * torch.rsqrt(mean_square + self.variance_epsilon)).to(x.dtype)
        return (normalised * self.weight).view(x.shape)


class LayerNorm(Layer):
    """``(x - mean) / deviation * weight + bias`` over the last dimension; called as ``RMSNorm``.

    shape: (n,), or (heads, n) if each head has its own weights (then there is no bias).
    """

    def __init__(self, *shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.variance_epsilon = 1.0 * eps  # what is no number fails here
        self.weight = make_parameter(torch.ones(shape))
        self.bias = make_parameter(torch.zeros(shape)) if bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x: [..., n]; with a residual both are [tokens, n], and x is added to it in place."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        options = (self.weight, self.bias, self.variance_epsilon, out)
        if residual is None:
            layer_norm(x, *options)
            return out
        add_layer_norm(x, residual, *options)
        return out, residual


class RMSNormGated(Layer):
    """``rms_norm(x) * silu(gate)`` per head, norm before gate (Qwen3.5 ``linear_attn.norm``)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.variance_epsilon = 1.0 * eps  # what is no number fails here
        self.weight = make_parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, n] dense; gate: the same shape, strided."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        gated_rms_norm(x, gate, self.weight, self.variance_epsilon, out)
        return out
