"""Granite 3, dense and with experts: Llama with multipliers on whatever can be multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import StackedParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3, dense."""

    def make_mlp(self, config: Any, prefix: str) -> nn.Module:
        """The MLP of a layer."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=prefix,
        )

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.attention_multiplier,
        )
        layout = BlockLayout(
            norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps),
            residual_multiplier=config.residual_multiplier,
        )
        mlp = self.make_mlp(config, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=1.0 / config.logits_scaling)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3, with a mixture of experts in every layer."""

    stacked_params: ClassVar[StackedParams] = {
        "qkv_proj": DecoderForCausalLM.stacked_params["qkv_proj"]
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    }

    def make_mlp(self, config: Any, prefix: str) -> nn.Module:
        experts = Experts(
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            prefix=f"{prefix}.experts",
        )
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=True)
        shared = self.make_shared_expert(config, f"{prefix}.shared_expert")
        return FusedMoE(config.hidden_size, experts, rule, shared_expert=shared, prefix=prefix)

    def make_shared_expert(self, config: Any, prefix: str) -> nn.Module | None:
        """What every token goes through beside its experts."""
        return None


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite 3, with a mixture of experts in every layer and an MLP for all tokens."""

    def make_shared_expert(self, config: Any, prefix: str) -> nn.Module | None:
        if not config.shared_intermediate_size:
            return None
        sizes = (config.hidden_size, config.shared_intermediate_size)
        return GatedMLP(*sizes, config.hidden_act, prefix=prefix)
