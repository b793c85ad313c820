"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS-36B."""

    mlp_bias = "mlp_bias"

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_out_bias
        )
