"""Ministral 8B, Ministral 3 and Mistral Small 3.1 (text): Mistral with a window in some layers, or
with queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.models.utils import LLAVA_PREFIXES, require_option


class MinistralForCausalLM(DecoderForCausalLM):
    """Ministral 8B."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=layer_sliding_window(config, index))


class Ministral3ForCausalLM(DecoderForCausalLM):
    """Ministral 3 3B, 8B and 14B, text-only checkpoints."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        rope = config.rope_parameters
        if rope.get("llama_4_scaling_beta") is None:
            raise ValueError(
                "config.json: rope_parameters has no llama_4_scaling_beta, which transformers' "
                "model needs; with 0 queries do not grow"
            )
        beta: float = 1.0 * rope["llama_4_scaling_beta"]

        def growth(positions: torch.Tensor) -> torch.Tensor:
            floors = torch.floor(positions / rope["original_max_position_embeddings"])
            return 1.0 + beta * torch.log(1.0 + floors)

        return AttentionOptions(
            sliding_window=config.sliding_window, query_factors=growth if beta else None
        )


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Ministral 3, Mistral Small 3.1 as published: the text model; the vision tower is skipped."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        """As the text model that the config names; Mistral's reads no growth of queries."""
        if config.model_type == "mistral":
            return AttentionOptions(sliding_window=config.sliding_window)
        require_option(config, model_type="ministral3")
        return super().attention_options(config, index)

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = LLAVA_PREFIXES
    skipped_weights: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
