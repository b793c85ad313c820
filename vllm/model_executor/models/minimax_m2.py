"""MiniMax-M2: attention with norms over whole queries and keys, experts by sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.mixtral import MixtralForCausalLM


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """MiniMax-M2 and M2.1: a part of each head rotated, experts by sigmoid scores."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MixtralForCausalLM.checkpoint_names,
        "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
    }
    module_names: ClassVar[Mapping[str, str]] = {
        **MixtralForCausalLM.module_names,
        ".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(qk_norm=WideRMSNorm.over_heads(config.rms_norm_eps))

    def routing_rule(self, config: Any) -> RoutingRule:
        rule = super().routing_rule(config)
        return replace(rule, scores="sigmoid", has_correction=True)
