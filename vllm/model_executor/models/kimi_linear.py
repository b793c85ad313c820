"""Kimi-Linear: Kimi delta attention, latent attention without positions every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.mamba.kda import KimiDeltaAttention
from vllm.model_executor.models.decoder_block import GatedMLP
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_names,
)
from vllm.model_executor.models.mixture import (
    NUMBERED_PROJECTIONS,
    bias_corrected_routing,
    make_moe,
)
from vllm.model_executor.models.utils import (
    STACKED_GATE_UP,
    StackedParams,
    layer_kind,
    number_at_end,
    require_option,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KimiLinearForCausalLM(HybridForCausalLM):
    """Kimi-Linear-48B-A3B: delta rules with decays by channel, latent attention, experts."""

    recurrent_name = "delta"
    stacked_params: ClassVar[StackedParams] = {
        **STACKED_GATE_UP,
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

    module_names: ClassVar[Mapping[str, str]] = {
        ".forget_gate.": ".",
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    }

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return {**self.checkpoint_names, **latent_names(self.config)}

    def published_name(self, name: str) -> str:
        """Rename dense MLPs, too, for which transformers writes the name of mixtures."""
        name = super().published_name(name)
        head, found, tail = name.partition(".block_sparse_moe.")
        kinds = dict(enumerate(self.config.mlp_layer_types))
        if not found or kinds.get(number_at_end(head)) != "dense":
            return name
        return f"{head}.mlp.{tail}"

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return LatentSelfAttention(vllm_config, LatentOptions(rotates=False), prefix)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_kimi_mlp(config, index, prefix, NUMBERED_PROJECTIONS)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_delta_attention(config, prefix)


def make_delta_attention(config: Any, prefix: str, **options: Any) -> KimiDeltaAttention:
    """Make the recurrent layer that the config describes; options: more of its arguments."""
    require_option(config, hidden_act="silu")  # for the convolutions
    return KimiDeltaAttention(
        hidden_size=config.hidden_size,
        num_heads=config.linear_num_heads,
        head_size=config.linear_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        rms_norm_eps=config.rms_norm_eps,
        prefix=prefix,
        **options,
    )


def make_kimi_mlp(config: Any, index: int, prefix: str, projections: tuple[str, ...]) -> nn.Module:
    """Make the MLP of layer ``index``: dense, or a mixture with an MLP for all tokens.

    projections: names of an expert's weights in the checkpoint.
    """
    if layer_kind(config, index, ("dense", "sparse"), "mlp_layer_types") == "dense":
        sizes = (config.hidden_size, config.intermediate_size)
        return GatedMLP(*sizes, config.hidden_act, prefix=prefix)
    width = config.moe_intermediate_size
    return make_moe(
        config,
        bias_corrected_routing(config),
        config.num_local_experts,
        width,
        prefix,
        projections=projections,
        shared_width=width * config.n_shared_experts,
    )
