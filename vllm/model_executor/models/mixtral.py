"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral 8x7B and 8x22B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
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
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=True)
        mlp = FusedMoE(config.hidden_size, experts, rule, prefix=f"{prefix}.mlp")
        options = AttentionOptions(sliding_window=config.sliding_window)
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
