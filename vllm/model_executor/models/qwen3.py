"""Qwen3, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3, dense."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            sliding_window=layer_sliding_window(config, index),
        )
        return LlamaDecoderLayer(vllm_config, options, prefix)
