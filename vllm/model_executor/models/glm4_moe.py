"""GLM-4.5 and 4.6: experts chosen by sigmoid scores and a correction, behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.config.model_facts import config_value
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


GLM_MOE_NAMES: Mapping[str, str] = {
    "mlp.router.gate": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert": "mlp.shared_experts",
}


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6; layers for predicting several tokens are skipped."""

    checkpoint_names: ClassVar[Mapping[str, str]] = GLM_MOE_NAMES

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)
        mlp = None
        if index >= config.first_k_dense_replace:
            mlp = make_glm_moe(config, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)


def prefixes_of_extra_layers(config: Any) -> tuple[str, ...]:
    """What the weights of layers that predict tokens further ahead are called."""
    first, count = config.num_hidden_layers, config_value(config, ("num_nextn_predict_layers",))
    return tuple(f"model.layers.{first + extra}." for extra in range(count or 0))


def bias_corrected_routing(config: Any) -> RoutingRule:
    """Sigmoid scores, a correction for the choice, groups (DeepSeek-V3)."""
    return RoutingRule(
        top_k=config.num_experts_per_tok,
        scores="sigmoid",
        renormalise=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group,
        num_groups_kept=config.topk_group,
        has_correction=True,
    )


def make_glm_moe(config: Any, prefix: str, rule: RoutingRule | None = None) -> FusedMoE:
    """The mixture that the config describes, with an MLP for all tokens.

    rule: None: :func:`bias_corrected_routing`.
    """
    rule = rule or bias_corrected_routing(config)
    experts = Experts(
        config.n_routed_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        activation=get_act_and_mul_fn(config.hidden_act),
        prefix=f"{prefix}.experts",
    )
    shared_size = config.moe_intermediate_size * (config.n_shared_experts or 0)
    shared = None
    if shared_size:
        sizes = (config.hidden_size, shared_size)
        shared = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.shared_expert")
    return FusedMoE(config.hidden_size, experts, rule, shared_expert=shared, prefix=prefix)
