"""Ling 3: Kimi delta attention, latent attention with gated heads at the end of every group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.fused_moe import PROJECTIONS
from vllm.model_executor.layers.mamba.kda import KimiDeltaAttention
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.glm4_moe import GLM_MOE_NAMES, prefixes_of_extra_layers
from vllm.model_executor.models.kimi_linear import KimiLinearForCausalLM, make_kimi_mlp
from vllm.model_executor.models.latent_attention import LatentOptions, LatentSelfAttention
from vllm.model_executor.models.utils import StackedParams, layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "full_attention")


class BailingHybridForCausalLM(DecoderForCausalLM):
    """Ling 3 Flash: delta rules with decays by channel, latent attention with gated heads."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = KimiLinearForCausalLM.stacked_params
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **GLM_MOE_NAMES,
        "model.embed_tokens": "model.word_embeddings",
        "self_attn": "attention",
        "self_attn.o_proj": "attention.dense",
        "delta": "attention",
        "delta.norm": "attention.o_norm",
        "delta.o_proj": "attention.dense",
        "mlp.router.correction": "mlp.gate.expert_bias",
    }

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        mlp = make_kimi_mlp(config, index, f"{prefix}.mlp", PROJECTIONS)
        if layer_kind(config, index, _KINDS) == "full_attention":
            options = LatentOptions(gates_heads=True)
            attention = LatentSelfAttention(vllm_config, options, f"{prefix}.self_attn")
            return DecoderBlock(config.hidden_size, attention, mlp, layout)
        require_option(config, hidden_act="silu")  # of the convolutions
        mixer = KimiDeltaAttention(
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_heads,
            head_size=config.linear_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            rms_norm_eps=config.rms_norm_eps,
            low_rank_gates=False,
            decay_bound=config.kda_lower_bound if config.kda_safe_gate else None,
            prefix=f"{prefix}.delta",
        )
        return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent={"delta": mixer})
