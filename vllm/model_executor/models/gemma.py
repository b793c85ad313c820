"""Gemma 1, 2 and 3, text: zero-centred norms, GELU as the gate, scaled embeddings.

Gemma 2 has norms after attention and MLP too, caps of scores and logits, and a window in every
other layer; Gemma 3 norms queries and keys instead of capping, and rotates by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma 1: Gemma 2B and 7B."""

    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm
    norms_after: ClassVar[bool] = False

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        """What the attention of the layer at ``index`` does."""
        return AttentionOptions(qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    def activation(self, config: Any) -> nn.Module:
        """The MLP's."""
        return get_act_and_mul_fn(config.hidden_act)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        sizes = (config.hidden_size, config.intermediate_size)
        layout = BlockLayout(
            norm=lambda size: GemmaRMSNorm(size, eps=config.rms_norm_eps),
            norms_after=self.norms_after,
        )
        return LlamaDecoderLayer(
            vllm_config,
            self.attention_options(config, index),
            prefix,
            mlp=GatedMLP(*sizes, self.activation(config), prefix=f"{prefix}.mlp"),
            layout=layout,
        )

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """The root of the hidden size, rounded as the weights are."""
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2."""

    norms_after: ClassVar[bool] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        require_option(config, use_bidirectional_attention=None)
        return AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            sliding_window=layer_sliding_window(config, index),
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
        )

    def activation(self, config: Any) -> nn.Module:
        return get_act_and_mul_fn(config.hidden_activation, "hidden_activation")

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=config.final_logit_softcapping)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, text, as a checkpoint of its own."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        require_option(config, use_bidirectional_attention=False, attn_logit_softcapping=None)
        return AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            rope_parameters=config.rope_parameters[config.layer_types[index]],
            sliding_window=layer_sliding_window(config, index),
            scale=config.query_pre_attn_scalar**-0.5,
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 as published: the text model; the vision tower is skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
