"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.models.llama import MistralForCausalLM
from vllm.model_executor.models.mixture import NUMBERED_PROJECTIONS, make_moe


class MixtralForCausalLM(MistralForCausalLM):
    """Mixtral 8x7B and 8x22B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
    }
    module_names: ClassVar[Mapping[str, str]] = {".mlp.gate.": ".block_sparse_moe.gate."}

    def routing_rule(self, config: Any) -> RoutingRule:
        """Return the rule that chooses experts."""
        return RoutingRule(top_k=config.num_experts_per_tok, renormalise=True)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        sizes = (config.num_local_experts, config.intermediate_size)
        return make_moe(
            config, self.routing_rule(config), *sizes, prefix, projections=NUMBERED_PROJECTIONS
        )
