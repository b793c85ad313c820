"""Llama 4, text: attention inside chunks, layers without rotation, experts.

Three layers in four rotate and attend from the start of a query's chunk of ``attention_chunk_size``
tokens. The fourth reads all tokens and does not rotate; its scores grow with the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe, outputs_first
from vllm.model_executor.models.utils import LLAVA_PREFIXES, layer_kind

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class Llama4ForCausalLM(DecoderForCausalLM):
    """Llama 4, a text-only checkpoint: experts, attention inside chunks."""

    # In transformers the router returns the experts' scores.
    hooks_without_path: ClassVar[frozenset[str]] = frozenset({"mlp.hook_router_logits"})
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp": "feed_forward",
        "mlp.router.gate": "feed_forward.router",
        "mlp.experts": "feed_forward.experts",
        "mlp.shared_expert": "feed_forward.shared_expert",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        kind = layer_kind(config, index, ("chunked_attention", "full_attention"))
        rotates = bool(config.no_rope_layers[index])  # despite its name, true for rotation

        def sharpness(positions: torch.Tensor) -> torch.Tensor:
            floors = torch.floor((positions + 1.0) / config.floor_scale)
            return torch.log1p(floors) * float(config.attn_scale) + 1.0

        def norm_without_weight(heads: HeadSlice, size: int) -> nn.Module:
            return RMSNorm(size, eps=config.rms_norm_eps, has_weight=False)

        return AttentionOptions(
            bias=config.attention_bias,
            qk_norm=norm_without_weight if config.use_qk_norm and rotates else False,
            normalises_rotated=True,
            rotates=rotates,
            interleaved=True,
            chunk_size=config.attention_chunk_size if kind == "chunked_attention" else None,
            query_factors=sharpness if config.attn_temperature_tuning and not rotates else None,
        )

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """Make a dense MLP or a mixture, whose experts get their inputs times their score."""
        if index not in config.moe_layers:
            return self.dense_mlp(config, prefix, config.intermediate_size_mlp)
        rule = RoutingRule(top_k=config.num_experts_per_tok, scores="sigmoid")
        experts, width = config.num_local_experts, config.intermediate_size
        return make_moe(config, rule, experts, width, prefix, shared_width=width, weighs_input=True)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        config = self.config
        sizes = (config.num_local_experts, config.hidden_size, config.intermediate_size)
        return outputs_first(name, tensor, *sizes)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """Llama 4 Scout and Maverick as published: the text model; the vision tower is skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = LLAVA_PREFIXES
    skipped_weights: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")

    @staticmethod
    def ties_head(model_config: ModelConfig) -> bool:
        """Read the option of ``text_config``, because the text model contains the head."""
        return bool(model_config.hf_text_config.tie_word_embeddings)
