"""The MLP of Gemma 4 that has experts beside it: each reads the stream through its own norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.ops.norms import rms_norm


class Gemma4MLPWithExperts(FusedMoE):
    """``norm(dense(x)) + norm(experts(norm(stream)))``; the router reads the stream, normed."""

    def __init__(self, config: Any, dense: nn.Module, prefix: str) -> None:
        experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_activation, "hidden_activation"),
            prefix=f"{prefix}.experts",
        )
        rule = RoutingRule(
            top_k=config.top_k_experts,
            top_k_option="top_k_experts",
            renormalise=True,
            has_expert_factors=True,
        )
        super().__init__(config.hidden_size, experts, rule, prefix=prefix)
        self.dense = dense
        self.epsilon = config.rms_norm_eps
        size = config.hidden_size
        self.dense_output_norm = RMSNorm(size, eps=self.epsilon)
        self.experts_input_norm = RMSNorm(size, eps=self.epsilon)
        self.experts_output_norm = RMSNorm(size, eps=self.epsilon)
        self.routing_scale = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: the normed stream, [tokens, hidden] -> the same shape."""
        output: torch.Tensor = self.dense_output_norm(self.dense(x))
        exact = stream.float()
        normed = torch.empty_like(exact)
        rms_norm(exact, None, self.epsilon, 0.0, normed)
        normed *= self.routing_scale.float() * len(self.routing_scale) ** -0.5
        routed = super().forward(self.experts_input_norm(stream), normed)
        return output.add_(self.experts_output_norm(routed))
