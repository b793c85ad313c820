"""A mixture of experts instead of an MLP: router, experts, and the expert that all tokens share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from vllm.forward_context import current_row_sink, only_rows
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import ReplicatedLinear, replicated_linear
from vllm.model_executor.layers.shared_experts import RoutedTokens, SharedExperts
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.experts import (
    choose_experts,
    combine_experts,
    sort_by_expert,
)
from vllm.ops.plain_math import sigmoid
from vllm.v1.rows.fields.experts import Experts as ExpertChoices

_FEWEST_TOKENS = 1024
_ROWS_OF_AN_EXPERT = 128
"""Rows of an expert that are computed at a time. More tokens need more memory, which is slow when
it is new; fewer rows wait for the expert's weights (measured on a CPU)."""


def tokens_at_once(num_experts: int, top_k: int) -> int:
    """Tokens of a step that go through a layer's experts together."""
    return max(_FEWEST_TOKENS, _ROWS_OF_AN_EXPERT * num_experts // top_k)


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """The rule by which logits become experts and weights (``vllm.ops.experts.choose_experts``)."""

    top_k: int
    top_k_option: str = "num_experts_per_tok"
    """The config's name of ``top_k``."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    num_groups_kept: int = 1
    group_best: int = 2
    """Experts of a group whose scores decide whether it is kept."""
    has_correction: bool = False
    """A vector of the checkpoint is added to the scores, for the choice only."""
    has_expert_factors: bool = False
    """Another vector multiplies the weights, with one number per expert."""


_EXPERTS = "num_experts / num_local_experts / n_routed_experts"


def _check_rule(rule: RoutingRule, num_experts: int, prefix: str) -> None:
    """ValueError: the rule cannot choose among so many experts."""
    groups, kept = rule.num_groups, rule.num_groups_kept
    if any(isinstance(value, float) for value in (groups, kept, rule.top_k)):
        given = f"num_expert_group={groups}, topk_group={kept}, num_experts_per_token={rule.top_k}"
        raise ValueError(f"config.json: {given}: each has to be a whole number without a point")
    if groups < 1 or num_experts % groups:
        raise ValueError(
            f"config.json: n_group={groups} does not divide the {num_experts} experts of "
            f"{prefix!r} ({_EXPERTS}; groups: or num_expert_group)"
        )
    if not 0 < kept <= groups:
        raise ValueError(f"config.json: topk_group={kept} has to be 1 to n_group={groups}")
    eligible = num_experts // groups * kept
    if not 0 < rule.top_k <= eligible:
        raise ValueError(
            f"config.json: {rule.top_k_option}={rule.top_k}: {prefix!r} has {rule.top_k} experts a "
            f"token, but there are {eligible} ({_EXPERTS}; a token's: or num_experts_per_token)"
        )


class Router(Layer):
    """Computes logits and choice in float32 in every model: a choice has no small errors."""

    def __init__(
        self, hidden_size: int, num_experts: int, rule: RoutingRule, *, bias: bool, prefix: str
    ) -> None:
        super().__init__()
        _check_rule(rule, num_experts, prefix)
        self.rule = rule
        self.gate = replicated_linear(
            hidden_size, num_experts, f"{prefix}.gate", bias=bias, params_dtype=torch.float32
        )
        self.correction: nn.Parameter | None = None
        if rule.has_correction:
            zeros = torch.zeros(num_experts, dtype=torch.float32)
            self.correction = make_parameter(zeros, _load_flat)
        self.expert_factors: nn.Parameter | None = None
        if rule.has_expert_factors:
            ones = torch.ones(num_experts, dtype=torch.float32)
            self.expert_factors = make_parameter(ones)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: float32 [tokens, hidden] -> weights float32 and experts int64, [tokens, top_k]."""
        rule = self.rule
        shape = (len(x), rule.top_k)
        weights, experts = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
        choose_experts(
            self.gate(x),
            self.correction,
            rule.scores == "sigmoid",
            rule.num_groups,
            rule.num_groups_kept,
            rule.group_best,
            rule.renormalise,
            rule.scaling,
            weights,
            experts,
        )
        if self.expert_factors is not None:
            weights *= self.expert_factors[experts]
        return weights, experts


def _load_flat(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Load a vector that some checkpoints keep as a matrix of one row."""
    if loaded_weight.dim() == 2 and loaded_weight.shape[0] == 1:
        loaded_weight = loaded_weight[0]
    check_shape(loaded_weight, tuple(param.shape))
    param.data.copy_(loaded_weight)


EXPERTS = ExpertChoices.source


class RoutedLayer(Layer):
    """A layer that chooses experts for every token and hands its choices to a sink."""

    num_experts: int
    top_k: int
    """Experts per token; 0: not known before the layer ran."""
    trace_index: int | None = None
    """Number among such layers, if choices are handed out."""

    def tell_choice(self, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """experts: int64, weights: float32, both [tokens, top_k], of the next tokens."""
        sink = current_row_sink()
        if sink is not None and self.trace_index is not None and sink.wants(EXPERTS):
            sink.put(EXPERTS, self.trace_index, experts, weights)


def number_routed_layers(model: nn.Module) -> ExpertChoices:
    """Let every :class:`RoutedLayer` of ``model`` hand out its choices, in the order of the layers.

    ValueError: there is no such layer, or their traces have different shapes.
    """
    found = [
        (_layer_of(name), m) for name, m in model.named_modules() if isinstance(m, RoutedLayer)
    ]
    if not found:
        raise ValueError(
            f"expert_trace=True, but {type(model).__name__} has no layers whose routing to experts "
            "this engine sees; leave it out"
        )
    found.sort(key=lambda pair: pair[0])
    top_ks = {layer.top_k for _, layer in found}
    if len(top_ks) > 1 or 0 in top_ks:
        raise ValueError(
            f"expert_trace=True, but the layers of {type(model).__name__} give a token "
            f"{', '.join(map(str, sorted(top_ks)))} experts; a trace has as many in every layer"
        )
    for index, (_, layer) in enumerate(found):
        layer.trace_index = index
    most_experts = max(layer.num_experts for _, layer in found)
    return ExpertChoices(tuple(number for number, _ in found), most_experts, top_ks.pop())


def number_shared_mixtures(model: nn.Module) -> list[FusedMoE]:
    """Number the mixtures whose experts several engines share; returns them in their order."""
    found = [
        (_layer_of(name), one)
        for name, one in model.named_modules()
        if isinstance(one, FusedMoE) and one.shared is not None
    ]
    found.sort(key=lambda pair: pair[0])
    for place, (layer, one) in enumerate(found):
        one.place, one.layer = place, layer
    return [one for _, one in found]


def _layer_of(name: str) -> int:
    """Index of the decoder layer in a module's path; -1: it is in none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


class LatentSpace(Layer):
    """Projections into the space in which experts compute, and back to the model's width."""

    def __init__(self, hidden_size: int, latent_size: int, *, bias: bool, prefix: str) -> None:
        super().__init__()
        self.down, self.up = (
            replicated_linear(*sizes, f"{prefix}.{name}", bias=bias)
            for name, sizes in (
                ("down", (hidden_size, latent_size)),
                ("up", (latent_size, hidden_size)),
            )
        )


class FusedMoE(RoutedLayer):
    """``sum over a token's experts of weight * expert(x)``, plus the shared expert.

    shared_expert: an MLP for every token; ``sigmoid(shared_expert_gate x)`` multiplies its output
    if it is gated. weighs_input: the weights multiply the experts' inputs, not their outputs
    (Llama 4). latent: the space in which only the experts compute (Nemotron-H).
    num_identity_experts: the number of further experts, numbered behind the others, whose output
    is their input (LongCat).
    """

    def __init__(
        self,
        hidden_size: int,
        experts: Experts,
        rule: RoutingRule,
        *,
        router_bias: bool = False,
        shared_expert: nn.Module | None = None,
        gates_shared_expert: bool = False,
        weighs_input: bool = False,
        latent: LatentSpace | None = None,
        num_identity_experts: int = 0,
        prefix: str = "",
    ) -> None:
        super().__init__()
        assert not (num_identity_experts and weighs_input)
        self.latent = latent
        self.num_identity_experts = num_identity_experts
        self.router = Router(
            hidden_size,
            experts.num_experts + num_identity_experts,
            rule,
            bias=router_bias,
            prefix=f"{prefix}.router",
        )
        self.experts = experts
        self.num_experts = experts.num_experts + num_identity_experts
        self.top_k = rule.top_k
        self.tokens_at_once = tokens_at_once(experts.num_experts, rule.top_k)
        self.weighs_input = weighs_input
        self.shared_expert = shared_expert
        self.shared_expert_gate: ReplicatedLinear | None = None
        if gates_shared_expert:
            self.shared_expert_gate = replicated_linear(
                hidden_size, 1, f"{prefix}.shared_expert_gate", params_dtype=torch.float32
            )
        self.shared: SharedExperts | None = None
        """The experts that several engines share, if they do."""
        if experts.engines is not None:
            self.shared = SharedExperts(
                experts, experts.engines, rule.top_k, weighs_input=weighs_input
            )
        self.place = self.layer = 0
        """If engines share experts: the number among such mixtures, and the decoder layer's."""

    def forward(self, x: torch.Tensor, routed_by: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden].

        routed_by: the router's input, float32 [tokens, hidden]; None: x.
        """
        output = x.new_empty(x.shape)
        for piece, counts in self._rounds(len(x)):
            if counts is not None and piece.start >= len(x):
                assert self.shared is not None
                self.shared.serve(counts, x.dtype)
                continue
            exact = x[piece].float()
            read = exact if routed_by is None else routed_by[piece]
            with only_rows(piece):
                self._compute(x[piece], exact, read, counts, output[piece])
        return output

    def serve(self, dtype: torch.dtype) -> None:
        """Compute for other engines in a pass that this one does not make, or has ended."""
        assert self.shared is not None
        for _, counts in self._rounds(None):
            assert counts is not None
            self.shared.serve(counts, dtype)

    def _rounds(self, num_tokens: int | None) -> Iterator[tuple[slice, list[int] | None]]:
        """Yield the tokens that are computed at a time, with the number of those that each engine
        brings; None: no engine shares the experts."""
        at_once, counts = self.tokens_at_once, None
        if self.experts.engines is not None:
            counts = self.experts.engines.begin_place(self.place, self.layer, num_tokens)
        for start in range(0, max(counts or [num_tokens or 0]), at_once):
            here = counts and [min(max(count - start, 0), at_once) for count in counts]
            yield slice(start, start + at_once), here

    def _compute(
        self,
        x: torch.Tensor,
        exact: torch.Tensor,
        routed_by: torch.Tensor,
        counts: list[int] | None,
        output: torch.Tensor,
    ) -> None:
        weights, chosen = self.router(routed_by)
        self.tell_choice(chosen, weights)
        inputs = x if self.latent is None else self.latent.down(x)
        pairs = sort_by_expert(chosen, self.experts.num_experts)
        factors = None
        if self.weighs_input:
            factors, weights = weights, torch.ones_like(weights)
        if self.shared is None or counts is None:
            outputs = x.new_empty((len(pairs.tokens), self.experts.hidden_size))
            self.experts.compute(inputs, pairs, factors, outputs)
            outputs = self.experts.complete(outputs, pairs.starts)
        else:
            outputs = self.shared.outputs(RoutedTokens(inputs, chosen, factors), counts)
        if self.num_identity_experts:  # their pairs come last
            pair = torch.arange(len(outputs), device=x.device)
            is_identity = (pair >= pairs.starts[-1])[:, None]
            outputs = torch.where(is_identity, inputs[pairs.tokens], outputs)
        shared = None if self.shared_expert is None else self.shared_expert(x)
        gate = self.shared_expert_gate
        shared_weights = None if gate is None else sigmoid(gate(exact)).squeeze(1)
        if self.latent is None:
            combine_experts(outputs, pairs.places, weights, shared, shared_weights, output)
            return
        mixed = torch.empty_like(inputs)
        combine_experts(outputs, pairs.places, weights, None, None, mixed)
        output.copy_(self.latent.up(mixed))
        if shared is not None:
            output += shared if shared_weights is None else shared * shared_weights[:, None]
