"""Helium: Llama that rotates pairs of adjacent elements."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium 1 2B."""

    mlp_bias = "mlp_bias"

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=config.attention_bias, interleaved=True)
