"""OLMo 2 and 3: norms after attention and MLP, not before, and of whole queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        norm = WideRMSNorm.over_heads(config.rms_norm_eps)
        return AttentionOptions(bias=config.attention_bias, qk_norm=norm)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        layout = super().block_layout(config, index)
        return replace(layout, norms_before=False, norms_after=True)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: windows and a different rotation in most layers."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        by_kind = config.rope_parameters
        return replace(
            super().attention_options(config, index),
            rope_parameters=by_kind.get(config.layer_types[index], by_kind),
            sliding_window=layer_sliding_window(config, index),
        )
