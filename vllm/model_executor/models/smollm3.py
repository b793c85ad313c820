"""SmolLM3: Llama without rotation in some layers."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3 3B."""

    mlp_bias = "mlp_bias"

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(
            bias=config.attention_bias,
            rotates=bool(config.no_rope_layers[index]),  # despite its name, true for rotation
            sliding_window=layer_sliding_window(config, index),
        )
