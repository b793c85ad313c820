"""Makes mixtures of experts, which replace an MLP, from configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.experts import PROJECTIONS, Experts
from vllm.model_executor.layers.fused_moe import FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import GatedMLP
from vllm.model_executor.utils import check_shape

NUMBERED_PROJECTIONS = ("w1", "w3", "w2")
"""Names of ``PROJECTIONS`` in Mixtral's and some other checkpoints."""


def make_moe(
    config: Any,
    rule: RoutingRule,
    num_experts: int,
    width: int,
    prefix: str,
    *,
    activation: nn.Module | None = None,
    bias: bool = False,
    projections: tuple[str, ...] = PROJECTIONS,
    shared_width: int = 0,
    **options: Any,
) -> FusedMoE:
    """Make experts, each ``width`` wide, with a gate.

    activation: None: the config's ``hidden_act``. shared_width: width of an MLP that runs for every
    token; 0: there is none. bias, projections: see :class:`Experts`; options: see
    :class:`FusedMoE`.
    """
    experts = Experts(
        num_experts,
        config.hidden_size,
        width,
        bias=bias,
        activation=activation or get_act_and_mul_fn(config.hidden_act),
        projections=projections,
        prefix=f"{prefix}.experts",
    )
    shared = None
    if shared_width:
        sizes = (config.hidden_size, shared_width)
        shared = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.shared_expert")
    return FusedMoE(
        config.hidden_size, experts, rule, shared_expert=shared, prefix=prefix, **options
    )


def bias_corrected_routing(config: Any) -> RoutingRule:
    """Make DeepSeek-V3's rule: sigmoid scores, a correction for the choice, groups."""
    return RoutingRule(
        top_k=config.num_experts_per_tok,
        scores="sigmoid",
        renormalise=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group,
        num_groups_kept=config.topk_group,
        has_correction=True,
    )


def outputs_first(
    name: str, tensor: torch.Tensor, num_experts: int, hidden_size: int, width: int
) -> torch.Tensor:
    """Transpose weights of all experts [experts, inputs, outputs] to the layers' layout; others are
    returned unchanged."""
    shapes = {"gate_up_proj": (hidden_size, 2 * width), "down_proj": (width, hidden_size)}
    head, _, leaf = name.rpartition(".")
    if not head.endswith("experts") or leaf not in shapes:
        return tensor
    check_shape(tensor, (num_experts, *shapes[leaf]))
    return tensor.transpose(1, 2)
