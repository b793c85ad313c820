"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS-36B."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_out_bias
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp_bias=config.mlp_bias)
