"""Nemotron-H: one mixer per layer - Mamba-2, attention, an MLP or a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.fused_moe import FusedMoE, LatentSpace
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.mixture import bias_corrected_routing
from vllm.model_executor.models.utils import STACKED_QKV, StackedParams, layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_KINDS = ("linear_attention", "full_attention", "mlp", "moe")


class NemotronHForCausalLM(HybridForCausalLM):
    """Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba-2, attention, MLPs and experts; no MTP."""

    norm_epsilon = "layer_norm_epsilon"
    mlp_class = PlainMLP
    mlp_activation = "mlp_hidden_act"
    mlp_bias = "mlp_bias"
    stacked_params: ClassVar[StackedParams] = STACKED_QKV
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

    def make_mixers(self, vllm_config: VllmConfig, index: int, prefix: str) -> dict[str, nn.Module]:
        config = vllm_config.model_config.hf_text_config
        kind = layer_kind(config, index, _KINDS, "layers_block_type")
        if kind == "linear_attention":
            return {"mixer": make_mamba(config, f"{prefix}.mixer")}
        if kind != "full_attention":
            return {}
        return {"self_attn": self.make_attention(vllm_config, index, f"{prefix}.self_attn")}

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        require_option(config, sliding_window=None, attention_bias=False)
        return AttentionOptions(rotates=False)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module | None:
        kind = layer_kind(config, index, _KINDS, "layers_block_type")
        if kind == "mlp":
            return self.dense_mlp(config, prefix)
        return self.make_moe(config, prefix) if kind == "moe" else None

    def make_moe(self, config: Any, prefix: str) -> FusedMoE:
        """Make experts without a gate, maybe in a latent space, and an MLP for all tokens."""
        latent, latent_size = None, config.moe_latent_size
        if latent_size:
            sizes = (config.hidden_size, latent_size)
            latent = LatentSpace(*sizes, bias=config.mlp_bias, prefix=f"{prefix}.latent")
        experts = Experts(
            config.n_routed_experts,
            latent_size or config.hidden_size,
            config.moe_intermediate_size,
            activation=get_act_fn(config.mlp_hidden_act, "mlp_hidden_act"),
            projections=("up_proj", "down_proj"),
            prefix=f"{prefix}.experts",
        )
        width = config.moe_shared_expert_intermediate_size or None
        return FusedMoE(
            config.hidden_size,
            experts,
            bias_corrected_routing(config),
            shared_expert=self.dense_mlp(config, f"{prefix}.shared_expert", width),
            latent=latent,
            prefix=prefix,
        )


def make_mamba(config: Any, prefix: str) -> Mamba2Mixer:
    """Make the recurrent layer that the config describes."""
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
