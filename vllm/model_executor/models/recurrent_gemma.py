"""RecurrentGemma: gated linear recurrences, attention in a window every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.rg_lru import RecurrentBlock
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams, layer_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "sliding_attention")


class RecurrentGemmaForCausalLM(DecoderForCausalLM):
    """RecurrentGemma 2B and 9B (Griffin): gated linear recurrences, and attention in a window."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj": {"linear_y": 0, "linear_x": 1},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "temporal_pre_norm",
        "post_attention_layernorm": "channel_pre_norm",
        "mlp": "mlp_block",
        "self_attn": "temporal_block",
        "recurrent": "temporal_block",
        "recurrent.out_proj": "temporal_block.linear_out",
        "model.norm": "model.final_norm",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        hidden_size, activation = config.hidden_size, config.hidden_activation
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        # The config counts both halves of what the gate's and the other projection make.
        width = config.intermediate_size // 2
        gate = get_act_and_mul_fn(activation, "hidden_activation")
        mlp = GatedMLP(hidden_size, width, gate, bias=True, prefix=f"{prefix}.mlp")
        if layer_kind(config, index, _KINDS) == "sliding_attention":
            options = AttentionOptions(
                qkv_bias=config.attention_bias,
                output_bias=True,
                sliding_window=config.attention_window_size,
            )
            attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
            return DecoderBlock(hidden_size, attention, mlp, layout)
        mixer = RecurrentBlock(
            hidden_size=hidden_size,
            width=config.lru_width,
            num_heads=config.num_attention_heads,
            conv_width=config.conv1d_width,
            conv_option="conv1d_width",
            activation=activation,
            activation_option="hidden_activation",
            prefix=f"{prefix}.recurrent",
        )
        return DecoderBlock(hidden_size, None, mlp, layout, recurrent={"recurrent": mixer})

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """The root of the hidden size, in bfloat16 whatever the weights are in."""
        return float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16))

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=config.logits_soft_cap)
