"""OLMoE: Llama with norms over whole queries and keys, and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE-1B-7B; no `clip_qkv`."""

    supported_options: ClassVar[Mapping[str, Any]] = {"clip_qkv": None}
    checkpoint_names: ClassVar[Mapping[str, str]] = {"mlp.router.gate": "mlp.gate"}

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        norm = WideRMSNorm.over_heads(config.rms_norm_eps)
        return AttentionOptions(bias=config.attention_bias, qk_norm=norm)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=config.norm_topk_prob)
        return make_moe(config, rule, config.num_experts, config.intermediate_size, prefix)
