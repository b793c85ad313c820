"""Nemotron-H: one mixer a layer - Mamba-2, attention, an MLP or a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, LatentSpace, RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    PlainMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams, layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "full_attention", "mlp", "moe")


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba-2, attention, MLPs and experts; no MTP."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {
        "qkv_proj": DecoderForCausalLM.stacked_params["qkv_proj"]
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model": "backbone",
        "model.embed_tokens": "backbone.embeddings",
        "model.norm": "backbone.norm_f",
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        "self_attn": "mixer",
        "mlp": "mixer",
        "mlp.router.gate": "mixer.gate",
        "mlp.router.correction": "mixer.gate.e_score_correction_bias",
        "mlp.shared_expert": "mixer.shared_experts",
        "mlp.latent.down": "mixer.fc1_latent_proj",
        "mlp.latent.up": "mixer.fc2_latent_proj",
        "mlp.experts.gate_up_proj": "mixer.experts.up_proj",
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("mtp.",)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return RMSNorm(size, eps=config.layer_norm_epsilon)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        kind = layer_kind(config, index, _KINDS, "layers_block_type")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        if kind == "linear_attention":
            mixer = make_mamba(config, f"{prefix}.mixer")
            return DecoderBlock(config.hidden_size, None, None, layout, recurrent={"mixer": mixer})
        if kind == "full_attention":
            require_option(config, sliding_window=None, attention_bias=False)
            options = AttentionOptions(rotates=False)
            attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
            return DecoderBlock(config.hidden_size, attention, None, layout)
        make = make_mlp if kind == "mlp" else make_moe
        return DecoderBlock(config.hidden_size, None, make(config, f"{prefix}.mlp"), layout)


def make_mamba(config: Any, prefix: str) -> Mamba2Mixer:
    """The recurrent layer that the config describes."""
    require_option(config, mamba_hidden_act="silu")
    sizes = Mamba2Sizes.read(
        config,
        num_heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        num_groups="n_groups",
        state_size="ssm_state_size",
        conv_width="conv_kernel",
    )
    return Mamba2Mixer(
        config.hidden_size,
        sizes,
        norm_eps=config.layer_norm_epsilon,
        input_bias=config.use_bias,
        output_bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        dt_limits=(config.time_step_min, math.inf),
        prefix=prefix,
    )


def make_mlp(config: Any, prefix: str, intermediate_size: int | None = None) -> PlainMLP:
    """``down(activation(up(x)))`` of the width that the config states, or of another."""
    return PlainMLP(
        config.hidden_size,
        intermediate_size or config.intermediate_size,
        get_act_fn(config.mlp_hidden_act, "mlp_hidden_act"),
        bias=config.mlp_bias,
        prefix=prefix,
    )


def make_moe(config: Any, prefix: str) -> FusedMoE:
    """Experts without a gate, in a latent space where there is one; an MLP for all tokens."""
    latent_size = config.moe_latent_size
    experts = Experts(
        config.n_routed_experts,
        latent_size or config.hidden_size,
        config.moe_intermediate_size,
        activation=get_act_fn(config.mlp_hidden_act, "mlp_hidden_act"),
        projections=("up_proj", "down_proj"),
        prefix=f"{prefix}.experts",
    )
    rule = RoutingRule(
        top_k=config.num_experts_per_tok,
        scores="sigmoid",
        renormalise=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group,
        num_groups_kept=config.topk_group,
        has_correction=True,
    )
    width = config.moe_shared_expert_intermediate_size
    latent = None
    if latent_size:
        sizes = (config.hidden_size, latent_size)
        latent = LatentSpace(*sizes, bias=config.mlp_bias, prefix=f"{prefix}.latent")
    return FusedMoE(
        config.hidden_size,
        experts,
        rule,
        shared_expert=make_mlp(config, f"{prefix}.shared_expert", width),
        latent=latent,
        prefix=prefix,
    )
