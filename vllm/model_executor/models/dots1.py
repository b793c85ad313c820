"""dots.llm1: GLM-4.5 with norms of every head, and windows when switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM, make_glm_moe
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Dots1ForCausalLM(Glm4MoeForCausalLM):
    """dots.llm1: experts behind a dense layer."""

    def weights_to_skip(self) -> tuple[str, ...]:
        return ()

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            sliding_window=layer_sliding_window(config, index),
        )
        mlp = None
        if index >= config.first_k_dense_replace:
            mlp = make_glm_moe(config, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
