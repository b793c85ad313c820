"""Ling 3: Kimi delta attention, latent attention with gated heads at the end of every group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.experts import PROJECTIONS
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.glm4_moe import GLM_MOE_NAMES, prefixes_of_extra_layers
from vllm.model_executor.models.kimi_linear import (
    KimiLinearForCausalLM,
    make_delta_attention,
    make_kimi_mlp,
)
from vllm.model_executor.models.latent_attention import LatentOptions, LatentSelfAttention
from vllm.model_executor.models.utils import StackedParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BailingHybridForCausalLM(HybridForCausalLM):
    """Ling 3 Flash: delta rules with decays by channel, latent attention with gated heads."""

    recurrent_name = "delta"
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

    module_names: ClassVar[Mapping[str, str]] = {
        ".forget_gate.": ".",
        ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    }

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return LatentSelfAttention(vllm_config, LatentOptions(gates_heads=True), prefix)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_kimi_mlp(config, index, prefix, PROJECTIONS)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        bound = config.kda_lower_bound if config.kda_safe_gate else None
        return make_delta_attention(config, prefix, low_rank_gates=False, decay_bound=bound)
