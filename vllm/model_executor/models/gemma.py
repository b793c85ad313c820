"""Gemma 1, 2 and 3, text: zero-centred norms, GELU as the gate, scaled embeddings.

Gemma 2 has norms after attention and MLP too, caps of scores and logits, and a window in every
other layer; Gemma 3 norms queries and keys instead of capping, and rotates by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.models.utils import LLAVA_PREFIXES


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma 1: Gemma 2B and 7B."""

    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """Return the root of the hidden size, rounded to the dtype of the weights."""
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2."""

    supported_options: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": None}
    mlp_activation = "hidden_activation"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(
            bias=config.attention_bias,
            sliding_window=layer_sliding_window(config, index),
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
        )

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(super().block_layout(config, index), norms_after=True)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=config.final_logit_softcapping)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, a text-only checkpoint."""

    supported_options: ClassVar[Mapping[str, Any]] = {
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return replace(
            super().attention_options(config, index),
            qk_norm=True,
            rope_parameters=config.rope_parameters[config.layer_types[index]],
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 as published: the text model; the vision tower is skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = LLAVA_PREFIXES
    skipped_weights: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
