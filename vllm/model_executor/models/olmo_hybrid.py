"""OLMo-Hybrid: gated delta nets behind their norms, attention before its norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.layers.mamba.gdn import GatedDeltaNet
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import (
    StackedParams,
    layer_kind,
    number_at_end,
    require_option,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OUTPUT_NORM_EPS = 1e-5
"""Of the norm inside a delta net, whatever the config says."""
_KINDS = ("linear_attention", "full_attention")


class OlmoHybridForCausalLM(DecoderForCausalLM):
    """OLMo-Hybrid 7B: gated delta nets, whose update may turn a direction round, and attention."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj_qkvzba": {
            f"{name}_proj": part for part, name in enumerate(("q", "k", "v", "g", "b", "a"))
        },
        "conv1d": {f"{name}_conv1d": part for part, name in enumerate("qkv")},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlp")
        is_attention = layer_kind(config, index, _KINDS) == "full_attention"
        layout = BlockLayout(
            norm=lambda size: self.make_norm(config, size),
            norms_before=not is_attention,
            norms_after=is_attention,
        )
        if not is_attention:
            mixer = make_delta_net(config, f"{prefix}.linear_attn")
            recurrent = {"linear_attn": mixer}
            return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent=recurrent)
        rope = config.rope_parameters
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=lambda heads, size: WideRMSNorm(heads * size, eps=config.rms_norm_eps),
            rotates=rope is not None and rope.get("rope_theta") is not None,
        )
        attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        return DecoderBlock(config.hidden_size, attention, mlp, layout)

    def published_name(self, name: str) -> str:
        """transformers writes a delta net's name of a norm for attention's norm, too."""
        head, found, tail = name.partition(".feedforward_layer_norm.")
        kinds = dict(enumerate(self.config.layer_types))
        if not found or kinds.get(number_at_end(head)) != "full_attention":
            return name
        return f"{head}.post_attention_layernorm.{tail}"


def make_delta_net(config: Any, prefix: str) -> GatedDeltaNet:
    """The recurrent layer that the config describes."""
    require_option(config, hidden_act="silu")  # of the convolutions
    return GatedDeltaNet(
        hidden_size=config.hidden_size,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        rms_norm_eps=_OUTPUT_NORM_EPS,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
        prefix=prefix,
    )
