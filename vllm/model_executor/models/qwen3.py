"""Qwen3, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3, dense."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(bias=config.attention_bias, qk_norm=True, sliding_window=window)
