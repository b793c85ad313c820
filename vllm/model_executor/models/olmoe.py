"""OLMoE: Llama with norms over whole queries and keys, and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE-1B-7B; no `clip_qkv`."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {"mlp.router.gate": "mlp.gate"}

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, clip_qkv=None)
        experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            prefix=f"{prefix}.mlp.experts",
        )
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=config.norm_topk_prob)
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=lambda heads, size: WideRMSNorm(heads * size, eps=config.rms_norm_eps),
        )
        mlp = FusedMoE(config.hidden_size, experts, rule, prefix=f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
