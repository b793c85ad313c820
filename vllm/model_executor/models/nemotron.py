"""Nemotron, dense: layer norms whose weights are stored less one, squared ReLU, no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 and Minitron, dense."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, config.hidden_act, bias=config.mlp_bias, prefix=f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.norm_eps)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1.0 if name.endswith("norm.weight") else tensor
