"""GLM-4 (0414 and before): rotation of adjacent pairs; 0414 also has norms after branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import STACKED_QKV, StackedParams


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4-9B and GLM-Edge, before 0414."""

    stacked_params: ClassVar[StackedParams] = STACKED_QKV

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=config.attention_bias, interleaved=True)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 and GLM-Z1."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(super().block_layout(config, index), norms_after=True)
