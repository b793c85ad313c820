"""Phi 1, 1.5 and 2: attention and MLP side by side after one layer norm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class PhiForCausalLM(DecoderForCausalLM):
    """Phi-1, Phi-1.5, Phi-2."""

    norm_class = LayerNorm
    norm_epsilon = "layer_norm_eps"
    mlp_class = PlainMLP
    mlp_bias = True
    head_bias: ClassVar[bool] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "self_attn.o_proj": "self_attn.dense",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=True, qk_norm=config.qk_layernorm)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(super().block_layout(config, index), parallel="one norm")
