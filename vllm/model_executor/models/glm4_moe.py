"""GLM-4.5 and 4.6: experts chosen by sigmoid scores and a correction, after some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.config.model_facts import config_value
from vllm.model_executor.layers.fused_moe import FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import bias_corrected_routing, make_moe

GLM_MOE_NAMES: Mapping[str, str] = {
    "mlp.router.gate": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert": "mlp.shared_experts",
}


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6; layers for multi-token prediction are skipped."""

    checkpoint_names: ClassVar[Mapping[str, str]] = GLM_MOE_NAMES

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        if index < config.first_k_dense_replace:
            return self.dense_mlp(config, prefix)
        return make_glm_moe(config, prefix, bias_corrected_routing(config))


def prefixes_of_extra_layers(config: Any) -> tuple[str, ...]:
    """Return the prefixes of the weights of layers for multi-token prediction."""
    first, count = config.num_hidden_layers, config_value(config, ("num_nextn_predict_layers",))
    return tuple(f"model.layers.{first + extra}." for extra in range(int(count or 0)))


def make_glm_moe(config: Any, prefix: str, rule: RoutingRule) -> FusedMoE:
    """Make the mixture that the config describes, with an MLP for all tokens."""
    width = config.moe_intermediate_size
    shared_width = width * (config.n_shared_experts or 0)
    experts = config.n_routed_experts
    return make_moe(config, rule, experts, width, prefix, shared_width=shared_width)
