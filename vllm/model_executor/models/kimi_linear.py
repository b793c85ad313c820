"""Kimi-Linear: Kimi delta attention, latent attention without positions every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE
from vllm.model_executor.layers.mamba.kda import KimiDeltaAttention
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.glm4_moe import bias_corrected_routing
from vllm.model_executor.models.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_names,
)
from vllm.model_executor.models.utils import (
    StackedParams,
    layer_kind,
    number_at_end,
    require_option,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "full_attention")


class KimiLinearForCausalLM(DecoderForCausalLM):
    """Kimi-Linear-48B-A3B: delta rules with decays by channel, latent attention, experts."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {
        "gate_up_proj": DecoderForCausalLM.stacked_params["gate_up_proj"],
        "in_proj_qkvb": {f"{name}_proj": part for part, name in enumerate("qkvb")},
        "conv1d": {f"{name}_conv1d": part for part, name in enumerate("qkv")},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "delta": "self_attn",
        "delta.norm": "self_attn.o_norm",
        "mlp.router.gate": "block_sparse_moe.gate",
        "mlp.router.correction": "block_sparse_moe.gate.e_score_correction_bias",
        "mlp.experts": "block_sparse_moe.experts",
        "mlp.shared_expert": "block_sparse_moe.shared_experts",
    }

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return {**self.checkpoint_names, **latent_names(self.config)}

    def published_name(self, name: str) -> str:
        """transformers writes the name of mixtures for dense MLPs, too."""
        head, found, tail = name.partition(".block_sparse_moe.")
        kinds = dict(enumerate(self.config.mlp_layer_types))
        if not found or kinds.get(number_at_end(head)) != "dense":
            return name
        return f"{head}.mlp.{tail}"

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        mlp = make_kimi_mlp(config, index, f"{prefix}.mlp", ("w1", "w3", "w2"))
        if layer_kind(config, index, _KINDS) == "full_attention":
            options = LatentOptions(rotates=False)
            attention = LatentSelfAttention(vllm_config, options, f"{prefix}.self_attn")
            return DecoderBlock(config.hidden_size, attention, mlp, layout)
        require_option(config, hidden_act="silu")  # of the convolutions
        mixer = KimiDeltaAttention(
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_heads,
            head_size=config.linear_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            rms_norm_eps=config.rms_norm_eps,
            prefix=f"{prefix}.delta",
        )
        return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent={"delta": mixer})


def make_kimi_mlp(
    config: Any, index: int, prefix: str, projections: tuple[str, str, str]
) -> nn.Module:
    """The MLP of layer ``index``: dense, or a mixture with an MLP for all tokens.

    projections: what an expert's weights are called in the checkpoint.
    """
    hidden_size, activation = config.hidden_size, config.hidden_act
    kind = layer_kind(config, index, ("dense", "sparse"), "mlp_layer_types")
    if kind == "dense":
        return GatedMLP(hidden_size, config.intermediate_size, activation, prefix=prefix)
    experts = Experts(
        config.num_local_experts,
        hidden_size,
        config.moe_intermediate_size,
        activation=get_act_and_mul_fn(activation),
        projections=projections,
        prefix=f"{prefix}.experts",
    )
    shared = None
    if shared_size := config.moe_intermediate_size * config.n_shared_experts:
        shared = GatedMLP(hidden_size, shared_size, activation, prefix=f"{prefix}.shared_expert")
    rule = bias_corrected_routing(config)
    return FusedMoE(hidden_size, experts, rule, shared_expert=shared, prefix=prefix)
