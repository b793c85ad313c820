"""Short convolutions between two gates, the recurrent layer of LFM2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.linear import merged_linear, row_linear
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.ops.layout import StateTensor


class ShortConv(RecurrentLayer):
    """``out_proj(C * convolution(B * x))``, where ``in_proj`` makes [B | C | x].

    ``kv_cache`` is ``(view [blocks, width - 1, hidden] in the model's dtype,)``: the last inputs
    of the convolution.
    """

    mamba_type: ClassVar[str] = "short_conv"

    def __init__(
        self, hidden_size: int, conv_width: int, *, bias: bool, option: str, prefix: str = ""
    ) -> None:
        """option: the config's name for ``conv_width``."""
        super().__init__()
        self.in_proj = merged_linear(hidden_size, [hidden_size] * 3, f"{prefix}.in_proj", bias=bias)
        self.conv = CausalConv1d((hidden_size,), conv_width, bias=bias, option=option)
        self.out_proj = row_linear(hidden_size, hidden_size, f"{prefix}.out_proj", bias=bias)
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        channels, width = self.conv.weight.shape
        return (StateTensor((width - 1, channels), dtype),)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        (cache,) = self.kv_cache
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        inputs = b * x
        out = torch.empty_like(inputs)
        convolved = self.conv(inputs, metadata, cache, silu=False, out=out)
        projected: torch.Tensor = self.out_proj(convolved.mul_(c))
        return projected
