"""DeepSeek-V2 and V3, and what is built alike: latent attention, experts behind dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.glm4_moe import (
    GLM_MOE_NAMES,
    bias_corrected_routing,
    make_glm_moe,
    prefixes_of_extra_layers,
)
from vllm.model_executor.models.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_names,
)
from vllm.model_executor.models.utils import StackedParams, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V3, V3.1, R1, Kimi-K2; layers for predicting several tokens are skipped."""

    stacked_params: ClassVar[StackedParams] = {
        "gate_up_proj": DecoderForCausalLM.stacked_params["gate_up_proj"]
    }

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return {**GLM_MOE_NAMES, **latent_names(self.config)}

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, mlp_bias=False)
        options = LatentOptions(interleaved=self.is_interleaved(config))
        attention = LatentSelfAttention(vllm_config, options, f"{prefix}.self_attn")
        mlp: nn.Module
        if self.has_experts(config, index):
            mlp = make_glm_moe(config, f"{prefix}.mlp", self.routing_rule(config))
        else:
            sizes = (config.hidden_size, config.intermediate_size)
            mlp = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps))
        return DecoderBlock(config.hidden_size, attention, mlp, layout)

    def is_interleaved(self, config: Any) -> bool:
        """Whether the rotation turns pairs of neighbours."""
        return bool(config.rope_interleave)

    def has_experts(self, config: Any, index: int) -> bool:
        """Whether that layer's MLP is a mixture."""
        require_option(config, moe_layer_freq=1)
        return bool(index >= config.first_k_dense_replace)

    def routing_rule(self, config: Any) -> RoutingRule:
        """How experts are chosen."""
        require_option(config, scoring_func="sigmoid", topk_method="noaux_tc")
        return bias_corrected_routing(config)


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2, V2.5, V2-Lite, Coder-V2: latent attention, and experts behind dense layers."""

    def is_interleaved(self, config: Any) -> bool:
        return True

    def routing_rule(self, config: Any) -> RoutingRule:
        require_option(config, scoring_func="softmax", norm_topk_prob=False)
        if config.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"config.json: topk_method={config.topk_method!r} is not supported; supported: "
                "'greedy', 'group_limited_greedy'"
            )
        is_limited = config.topk_method == "group_limited_greedy"
        return RoutingRule(
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            num_groups=config.n_group if is_limited else 1,
            num_groups_kept=config.topk_group if is_limited else 1,
            group_best=1,
        )


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash; layers for predicting several tokens are skipped."""

    def has_experts(self, config: Any, index: int) -> bool:
        return bool(config.mlp_layer_types[index] == "sparse")
