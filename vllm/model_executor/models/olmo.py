"""OLMo 1: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo 1; no `clip_qkv`."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, clip_qkv=None)
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        norm = LayerNorm(size, bias=False)
        ones = norm.weight.data
        del norm.weight
        norm.register_buffer("weight", ones, persistent=False)
        return norm
