"""LFM2: short convolutions, attention every few layers; with experts in LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import StackedParams, layer_kind
from vllm.utils import cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2 350M to 2.6B: short convolutions, attention every few layers."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
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

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return RMSNorm(size, eps=config.norm_eps)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """The MLP of the layer at ``index``."""
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = 2 * size // 3
            if config.block_ffn_dim_multiplier is not None:
                multiple = config.block_multiple_of
                size = cdiv(int(config.block_ffn_dim_multiplier * size), multiple) * multiple
        return GatedMLP(config.hidden_size, size, prefix=prefix)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        mlp = self.make_mlp(config, index, f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        if layer_kind(config, index, ("conv", "full_attention")) == "full_attention":
            options = AttentionOptions(qk_norm=True)
            return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)
        conv = ShortConv(
            config.hidden_size,
            config.conv_L_cache,
            bias=config.conv_bias,
            option="conv_L_cache",
            prefix=f"{prefix}.conv",
        )
        return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent={"conv": conv})


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2-8B-A1B: LFM2 with experts behind some dense layers."""

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        if index < config.num_dense_layers:
            return GatedMLP(config.hidden_size, config.intermediate_size, prefix=prefix)
        experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            projections=("w1", "w3", "w2"),
            prefix=f"{prefix}.experts",
        )
        rule = RoutingRule(
            top_k=config.num_experts_per_tok,
            scores="sigmoid",
            renormalise=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            has_correction=config.use_expert_bias,
        )
        return FusedMoE(config.hidden_size, experts, rule, prefix=prefix)
