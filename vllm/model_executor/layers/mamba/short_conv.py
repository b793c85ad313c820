"""Short convolutions between two gates, the recurrent layer of LFM2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1dWeight
from vllm.ops.recurrent import causal_conv1d
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import RecurrentMetadata


class ShortConv(Layer, AttentionLayerBase):
    """``out_proj(C * convolution(B * x))``, where ``in_proj`` makes [B | C | x].

    ``kv_cache`` is ``(view [blocks, width - 1, hidden] in the model's dtype,)``: the last inputs
    of the convolution.
    """

    kv_cache: tuple[torch.Tensor]

    def __init__(
        self, hidden_size: int, conv_width: int, *, bias: bool, option: str, prefix: str = ""
    ) -> None:
        """option: the config's name for ``conv_width``."""
        super().__init__()
        self.in_proj = MergedColumnParallelLinear(
            hidden_size,
            [hidden_size] * 3,
            bias=bias,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv = CausalConv1dWeight((hidden_size,), conv_width, bias=bias, option=option)
        self.out_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=bias, prefix=f"{prefix}.out_proj", return_bias=False
        )
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        model_config = vllm_config.model_config
        channels, width = self.conv.weight.shape
        return MambaSpec(
            block_size=vllm_config.cache_config.mamba_block_size or model_config.max_model_len,
            shapes=((width - 1, channels),),
            dtypes=(model_config.dtype,),
            mamba_type="short_conv",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata: RecurrentMetadata = get_forward_context().attn_metadata[self.layer_name]
        (cache,) = self.kv_cache
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        inputs = b * x
        convolved = torch.empty_like(inputs)
        causal_conv1d(
            inputs,
            self.conv.weight,
            self.conv.bias,
            False,
            metadata.layout,
            metadata.states,
            cache,
            convolved,
        )
        projected: torch.Tensor = self.out_proj(convolved.mul_(c))
        return projected
