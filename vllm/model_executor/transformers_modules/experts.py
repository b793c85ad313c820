"""Experts of transformers' mixtures over our product: one expert after another, row by row.

transformers keeps the experts of a layer in one tensor and looks up the function that multiplies
with it. Here each expert's part is a linear layer of ours, so weights lie in panels, and a token's
bits do not depend on how many others chose the same expert.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe import RoutedLayer, tokens_at_once
from vllm.model_executor.transformers_modules.made_up import is_made_up, made_up
from vllm.model_executor.transformers_modules.mlps import shared_activation
from vllm.model_executor.transformers_modules.parts import PanelLinear
from vllm.ops.experts import SortedPairs, combine_experts, sort_by_expert

EXPERTS = "vllm_experts"
"""``experts_implementation`` of modules with our experts."""


class TransformersExperts(RoutedLayer):
    """The experts of one layer. up: gives [gate | up], or up alone; down: leads back to the stream.

    between: computes the input of the second product from the output of the first.
    """

    top_k = 0

    def __init__(
        self,
        up: list[PanelLinear],
        down: list[PanelLinear],
        between: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.num_experts = len(up)
        self.up = nn.ModuleList(up)
        self.down = nn.ModuleList(down)
        # In a tuple, because its module is not a part of this one.
        self._between = (between,)
        self.is_cut = False
        """True if each rank has a part of every expert's width."""

    def multiply(
        self, x: torch.Tensor, pairs: SortedPairs, norm: Callable[..., torch.Tensor] | None
    ) -> torch.Tensor:
        """x: [tokens, hidden] -> [pairs, hidden]; zeros for pairs with an expert past the last."""
        (between,) = self._between
        bounds = list(pairwise(pairs.starts.tolist()))
        outputs = x.new_empty((len(pairs.tokens), x.shape[1]))
        outputs[bounds[-1][1] :] = 0
        gathered = x.new_empty((max(end - begin for begin, end in bounds), x.shape[1]))
        # One expert after another, so what lies between its products stays in the caches.
        for up, down, (begin, end) in zip(self.up, self.down, bounds, strict=True):
            if begin < end:
                own = gathered[: end - begin]
                torch.index_select(x, 0, pairs.tokens[begin:end], out=own)
                part = down(between(up(own)))
                if norm is not None:
                    part = norm(tensor_model_parallel_all_reduce(part) if self.is_cut else part)
                outputs[begin:end] = part
        return outputs


def replace_experts(model: Any) -> int:
    """Replace the experts of mixtures with transformers' interface; return how many there are."""
    found = [module for module in model.modules() if _is_known(module)]
    if not found:
        return 0
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _run_experts)
    for module in found:
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = _split(module, up_name), _split(module, "down_proj")
        between = module._apply_gate if module.has_gate else module.act_fn
        size, like = up[0].out_features, getattr(module, up_name)
        ours = shared_activation(between, size, module.has_gate, like)
        module.engine_experts = TransformersExperts(up, down, ours or between)
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


def _split(module: Any, name: str) -> list[PanelLinear]:
    """Make one linear layer per expert, in the memory of the joined tensor if possible."""
    weights = getattr(module, name).data
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    if is_made_up(weights):
        weights = [made_up(weights.shape[1:], weights.dtype)] * len(weights)
    elif module.is_transposed:
        weights = weights.contiguous()
    biases = getattr(module, f"{name}_bias").data if module.has_bias else [None] * len(weights)
    return [
        PanelLinear(_parameter(weight), None if bias is None else _parameter(bias))
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
    """hidden_states: [tokens, hidden]; top_k_*: [tokens, k]; an index past the last
    expert stands for none.

    -> [tokens, hidden]: outputs times weights, summed in the order of k.
    """
    experts: TransformersExperts = module.engine_experts
    num_tokens, num_chosen = top_k_index.shape
    experts.top_k = num_chosen
    if experts.is_cut:
        # Some products of other modules may differ in their last bits from rank to rank, and so
        # choose another of two experts that are nearly alike: then parts would not belong together.
        top_k_index = get_tp_group().broadcast(top_k_index)
    experts.tell_choice(top_k_index, top_k_weights)
    norm = module.post_expert_norm if module.has_post_expert_norm else None
    output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    at_once = tokens_at_once(experts.num_experts, num_chosen)
    for start in range(0, num_tokens, at_once):
        piece = slice(start, start + at_once)
        with torch._C.DisableTorchFunction():  # not a function that the module calls
            pairs = sort_by_expert(top_k_index[piece], experts.num_experts)
        outputs = experts.multiply(hidden_states[piece], pairs, norm)
        weights = top_k_weights[piece].float().contiguous()
        combine_experts(outputs, pairs.places, weights, None, None, output[piece])
    if experts.is_cut and norm is None:
        return tensor_model_parallel_all_reduce(output)
    return output
