"""Experts of transformers' mixtures over our product: one expert after another, row by row.

transformers keeps the experts of a layer in one tensor and looks up who multiplies with it. Here
each expert's part is a linear layer of ours, so that weights are packed, and a token's bits do not
depend on how many others chose the same expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import RoutedLayer
from vllm.model_executor.transformers_modules.parts import PackedLinear

EXPERTS = "vllm_experts"
"""``experts_implementation`` of modules whose experts are ours."""


class PackedExperts(RoutedLayer):
    """The experts of one layer. up: to [gate | up], or up alone; down: back to the stream."""

    top_k = 0

    def __init__(self, up: list[PackedLinear], down: list[PackedLinear]) -> None:
        super().__init__()
        self.num_experts = len(up)
        self.up = nn.ModuleList(up)
        self.down = nn.ModuleList(down)


def replace_experts(model: Any) -> int:
    """Take over the experts of every mixture that transformers' interface knows; their number."""
    found = [module for module in model.modules() if _is_known(module)]
    if not found:
        return 0
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _run_experts)
    for module in found:
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        module.packed_experts = PackedExperts(_split(module, up_name), _split(module, "down_proj"))
        for name in (up_name, "down_proj", f"{up_name}_bias", "down_proj_bias"):
            if getattr(module, name, None) is not None:
                setattr(module, name, None)
    model.set_experts_implementation(EXPERTS)
    return len(found)


def _is_known(module: Any) -> bool:
    if not (hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel")):
        return False
    weights = [getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)]
    weights.append(getattr(module, "down_proj", None))
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def _split(module: Any, name: str) -> list[PackedLinear]:
    """One linear layer for each expert, in the memory of all of them where it can be."""
    weights = getattr(module, name).data
    if module.is_transposed:
        weights = weights.transpose(1, 2).contiguous()
    biases = getattr(module, f"{name}_bias").data if module.has_bias else [None] * len(weights)
    return [
        PackedLinear(_parameter(weight), None if bias is None else _parameter(bias), name)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _run_experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """hidden_states: [tokens, hidden]; top_k_*: [tokens, k], an index past the last expert: none.

    -> [tokens, hidden]: outputs times weights, added up in the order of k.
    """
    experts: PackedExperts = module.packed_experts
    num_tokens, num_chosen = top_k_index.shape
    experts.top_k = num_chosen
    experts.tell_choice(top_k_index, top_k_weights)
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=len(experts.up)).tolist()
    rows = hidden_states[order // num_chosen]
    outputs = torch.zeros_like(rows)
    start = 0
    for up, down, count in zip(experts.up, experts.down, counts, strict=False):
        if count:
            part = up(rows[start : start + count])
            part = module._apply_gate(part) if module.has_gate else module.act_fn(part)
            part = down(part)
            if module.has_post_expert_norm:
                part = module.post_expert_norm(part)
            outputs[order[start : start + count]] = part
        start += count
    by_token = outputs.view(num_tokens, num_chosen, -1)
    weights = top_k_weights.float()
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for k in range(num_chosen):
        total += by_token[:, k].float() * weights[:, k, None]
    return total.to(hidden_states.dtype)
