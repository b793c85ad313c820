"""Bamba and Granite 4: Mamba-2 or attention, then an MLP or experts, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.granite import GraniteMoeSharedForCausalLM
from vllm.model_executor.models.utils import layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "full_attention")


def make_bamba_mixer(config: Any, prefix: str) -> Mamba2Mixer:
    """The recurrent layer that a config of Bamba's describes."""
    require_option(config, hidden_act="silu")
    return Mamba2Mixer(
        config.hidden_size,
        Mamba2Sizes.read(config),
        norm_eps=config.rms_norm_eps,
        input_bias=config.mamba_proj_bias,
        output_bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        dt_limits=config.time_step_limit,
        prefix=prefix,
    )


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba 9B: Mamba-2, attention every few layers, an MLP in each."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=f"{prefix}.mlp",
        )
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        attention, recurrent = None, None
        if layer_kind(config, index, _KINDS, "layers_block_type") == "linear_attention":
            recurrent = {"mamba": make_bamba_mixer(config, f"{prefix}.mamba")}
        else:
            bias = config.attention_bias
            options = AttentionOptions(qkv_bias=bias, output_bias=bias)
            attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        return DecoderBlock(config.hidden_size, attention, mlp, layout, recurrent=recurrent)


class GraniteMoeHybridForCausalLM(GraniteMoeSharedForCausalLM):
    """Granite 4: Mamba-2, attention every few layers, an MLP or experts in each."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True

    def names_in_checkpoint(self) -> Mapping[str, str]:
        if self.config.num_local_experts:
            return self.checkpoint_names
        return {
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(
            norm=lambda size: self.make_norm(config, size),
            residual_multiplier=config.residual_multiplier,
        )
        attention, recurrent = None, None
        if layer_kind(config, index, _KINDS) == "linear_attention":
            recurrent = {"mamba": make_bamba_mixer(config, f"{prefix}.mamba")}
        else:
            options = AttentionOptions(
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                scale=config.attention_multiplier,
                rotates=config.position_embedding_type == "rope",
            )
            attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        mlp = self.make_mlp(config, f"{prefix}.mlp")
        return DecoderBlock(config.hidden_size, attention, mlp, layout, recurrent=recurrent)

    def make_mlp(self, config: Any, prefix: str) -> nn.Module:
        if config.num_local_experts:
            return super().make_mlp(config, prefix)
        sizes = (config.hidden_size, config.shared_intermediate_size)
        return GatedMLP(*sizes, config.hidden_act, prefix=prefix)
