"""dots.llm1: GLM-4.5 with norms of every head, and windows if the config has them."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window


class Dots1ForCausalLM(Glm4MoeForCausalLM):
    """dots.llm1: experts after a dense layer."""

    def weights_to_skip(self) -> tuple[str, ...]:
        return ()

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(bias=config.attention_bias, qk_norm=True, sliding_window=window)
