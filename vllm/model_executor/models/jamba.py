"""Jamba: Mamba with attention every few layers, and experts in some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.mamba.mamba1 import MAMBA_NAMES, MambaMixer
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class JambaForCausalLM(DecoderForCausalLM):
    """Jamba 1 to 1.7, Mini and Large: Mamba, attention without positions, experts."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MAMBA_NAMES,
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
        "mlp.router.gate": "feed_forward.router",
        "model.norm": "model.final_layernorm",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        mlp = make_jamba_mlp(config, index, f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        if layer_kind(config, index, ("linear_attention", "full_attention")) == "full_attention":
            options = AttentionOptions(rotates=False)
            return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)
        require_option(config, hidden_act="silu")  # of the convolution
        mixer = MambaMixer(
            hidden_size=config.hidden_size,
            intermediate_size=config.mamba_expand * config.hidden_size,
            state_size=config.mamba_d_state,
            step_rank=config.mamba_dt_rank,
            conv_width=config.mamba_d_conv,
            conv_option="mamba_d_conv",
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
            norm=layout.norm,
            prefix=f"{prefix}.mamba",
        )
        return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent={"mamba": mixer})


def make_jamba_mlp(config: Any, index: int, prefix: str) -> nn.Module:
    """The MLP of layer ``index``: dense, or a mixture with weights as the softmax has them."""
    num_experts = config.layers_num_experts[index]
    sizes = (config.hidden_size, config.intermediate_size)
    if num_experts == 1:
        return GatedMLP(*sizes, config.hidden_act, prefix=prefix)
    activation = get_act_and_mul_fn(config.hidden_act)
    experts = Experts(num_experts, *sizes, activation=activation, prefix=f"{prefix}.experts")
    rule = RoutingRule(top_k=config.num_experts_per_tok)
    return FusedMoE(config.hidden_size, experts, rule, prefix=prefix)
