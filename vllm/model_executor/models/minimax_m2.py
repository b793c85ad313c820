"""MiniMax-M2: attention with norms over whole queries and keys, experts by sigmoid scores."""

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
from vllm.model_executor.models.mixtral import MixtralForCausalLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    """MiniMax-M2 and M2.1: a part of each head rotated, experts by sigmoid scores."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MixtralForCausalLM.checkpoint_names,
        "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        experts = Experts(
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            projections=("w1", "w3", "w2"),
            prefix=f"{prefix}.mlp.experts",
        )
        rule = RoutingRule(
            top_k=config.num_experts_per_tok,
            scores="sigmoid",
            renormalise=True,
            has_correction=True,
        )
        mlp = FusedMoE(config.hidden_size, experts, rule, prefix=f"{prefix}.mlp")
        options = AttentionOptions(
            qk_norm=lambda heads, size: WideRMSNorm(heads * size, eps=config.rms_norm_eps)
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
