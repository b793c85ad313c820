"""LFM2: short convolutions, attention every few layers; with experts in LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.mixture import NUMBERED_PROJECTIONS, make_moe
from vllm.model_executor.models.utils import STACKED_QKV, StackedParams
from vllm.utils import cdiv


class Lfm2ForCausalLM(HybridForCausalLM):
    """LFM2 350M to 2.6B: short convolutions, attention every few layers."""

    recurrent_name = "conv"
    layer_kinds = ("conv", "full_attention")
    norm_epsilon = "norm_eps"
    stacked_params: ClassVar[StackedParams] = {
        **STACKED_QKV,
        "gate_up_proj": {"w1": 0, "w3": 1},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp": "feed_forward",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.router.gate": "feed_forward.gate",
        "mlp.router.correction": "feed_forward.expert_bias",
        "model.norm": "model.embedding_norm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(qk_norm=True)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = 2 * size // 3
            if config.block_ffn_dim_multiplier is not None:
                multiple = config.block_multiple_of
                size = cdiv(int(config.block_ffn_dim_multiplier * size), multiple) * multiple
        return GatedMLP(config.hidden_size, size, prefix=prefix)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return ShortConv(
            config.hidden_size,
            config.conv_L_cache,
            bias=config.conv_bias,
            option="conv_L_cache",
            prefix=prefix,
        )


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2-8B-A1B: LFM2 with experts after some dense layers."""

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        if index < config.num_dense_layers:
            return GatedMLP(config.hidden_size, config.intermediate_size, prefix=prefix)
        rule = RoutingRule(
            top_k=config.num_experts_per_tok,
            scores="sigmoid",
            renormalise=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            has_correction=config.use_expert_bias,
        )
        return make_moe(
            config,
            rule,
            config.num_experts,
            config.moe_intermediate_size,
            prefix,
            activation=SiluAndMul(),
            projections=NUMBERED_PROJECTIONS,
        )
