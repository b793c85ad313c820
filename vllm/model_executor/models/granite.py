"""Granite 3, dense and with experts: Llama with multipliers at embeddings, branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe
from vllm.model_executor.models.utils import STACKED_QKV, StackedParams


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3, dense."""

    mlp_bias: ClassVar[bool | str] = "mlp_bias"
    scales_given_embeddings: ClassVar[bool] = True

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.attention_bias, scale=config.attention_multiplier)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        multiplier = config.residual_multiplier
        return replace(super().block_layout(config, index), residual_multiplier=multiplier)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=1.0 / config.logits_scaling)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3, with a mixture of experts in every layer."""

    stacked_params: ClassVar[StackedParams] = STACKED_QKV
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    }
    module_names: ClassVar[Mapping[str, str]] = {
        ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
    }

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=True)
        sizes = (config.num_local_experts, config.intermediate_size)
        return make_moe(config, rule, *sizes, prefix, shared_width=self.shared_width(config))

    def shared_width(self, config: Any) -> int:
        """Return the width of an MLP that runs for every token besides experts; 0: none."""
        return 0


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite 3, with a mixture of experts in every layer and an MLP for all tokens."""

    # In transformers these are two modules.
    hooks_without_path: ClassVar[frozenset[str]] = frozenset({"mlp.hook_out"})

    def shared_width(self, config: Any) -> int:
        return int(config.shared_intermediate_size or 0)
