"""A mixture of experts instead of an MLP: router, experts, and the expert that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import nn

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.engine_group import get_engine_group
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import current_adapters, current_row_sink, only_rows
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import ReplicatedLinear, ShardId, divide, replicated_linear
from vllm.model_executor.layers.quantization.at_load import quantise_of_current_config
from vllm.model_executor.layers.shared_experts import RoutedTokens, SharedExperts
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.layers.weight_share import Run, Share, Stored
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.experts import (
    SortedPairs,
    choose_experts,
    combine_experts,
    expert_linear,
    sort_by_expert,
)
from vllm.ops.packed_linear import PackedExperts, PackedWeight
from vllm.ops.plain_math import sigmoid
from vllm.v1.rows.fields.experts import Experts as ExpertChoices

_FEWEST_TOKENS = 1024
_ROWS_OF_AN_EXPERT = 128
"""Rows of an expert that are computed at a time. More tokens need more memory, which is slow when
it is new; fewer rows wait for the expert's weights (measured on a CPU)."""
_PAIRS_OF_A_GROUP = 128
"""Pairs that are gathered and activated together if they belong to several experts."""


def tokens_at_once(num_experts: int, top_k: int) -> int:
    """Tokens of a step that go through a layer's experts together."""
    return max(_FEWEST_TOKENS, _ROWS_OF_AN_EXPERT * num_experts // top_k)


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's weights in most checkpoints; two names mean that it has no gate."""


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


def _one_by_one(weights: Stored | PackedExperts) -> Iterable[Stored]:
    assert not isinstance(weights, PackedWeight)
    return weights.weights if isinstance(weights, PackedExperts) else weights.unbind()


def _spreads_experts() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.enable_expert_parallel


EXPERTS = ExpertChoices.source


class Experts(Layer):
    """The experts' weights, gate above up, and their products.

    Each expert is cut over the ranks or, with ``enable_expert_parallel``, each rank has some of
    them whole: each rank of this engine or, if engines share experts, of all of them. With two
    ``projections`` there is no gate, and ``gate_up_proj`` is the one before the activation.

    In a checkpoint either one tensor holds all experts (``gate_up_proj`` [experts, 2 I, H],
    ``down_proj`` [experts, H, I], biases ``gate_up_proj_bias``, ``down_proj_bias``), or each
    expert has tensors ``{expert}.{name}.weight`` with the names in ``projections``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: nn.Module | None = None,
        projections: tuple[str, ...] = PROJECTIONS,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.whole_size = intermediate_size
        self.tp_rank, self._ranks = get_tensor_model_parallel_rank(), get_tp_group()
        tp_size = get_tensor_model_parallel_world_size()
        self.engines = get_engine_group()
        """The engines that share the experts; None: this one has them all."""
        rank, parts = self.tp_rank, tp_size if _spreads_experts() else 1
        if self.engines is not None:
            rank, parts = self.engines.rank, self.engines.world_size
        self._is_spread = parts > 1
        self.bounds = [num_experts * part // parts for part in range(parts + 1)]
        """First expert of each rank, and the number of experts."""
        self.own = range(num_experts)
        if self._is_spread:
            if num_experts < parts:
                sizes = f"tensor_parallel_size={tp_size}"
                if self.engines is not None:
                    sizes = f"data_parallel_size={self.engines.num_engines} times {sizes}"
                raise ValueError(
                    f"enable_expert_parallel: the {num_experts} experts of {prefix!r} cannot be "
                    f"spread over {sizes} ranks; use at most {num_experts}"
                )
            self.own = range(*self.bounds[rank : rank + 2])
            self.tp_rank, tp_size = 0, 1  # of one that has whole experts
        self.size = divide(intermediate_size, tp_size, f"the experts' width of {prefix!r}")
        self.projections = projections
        self.num_inputs = len(projections) - 1
        self.activation = activation or SiluAndMul()
        self.gate_up_proj = self._parameter(
            self.num_inputs * self.size, hidden_size, loader=self.load_gate_up
        )
        self.down_proj = self._parameter(hidden_size, self.size, loader=self.load_down)
        for parameter in (self.gate_up_proj, self.down_proj):
            Weight(parameter, quantise=quantise_of_current_config(), keeps_codes=True)
        self.gate_up_proj_bias = self.down_proj_bias = None
        if bias:
            self.gate_up_proj_bias = self._parameter(
                self.num_inputs * self.size, loader=self.load_gate_up
            )
            self.down_proj_bias = self._parameter(hidden_size, loader=self.load_down_bias)

    def _parameter(self, *shape: int, loader: Callable[..., None]) -> nn.Parameter:
        return make_parameter(torch.empty(len(self.own), *shape), loader)

    # ---- loading; a shard is (expert, part: gate 0, up 1), None is all of them

    def checkpoint_layouts(self, leaf: str) -> list[Mapping[str, ShardId]]:
        """List the layouts of a parameter in checkpoints: its tensors and their shards."""
        parts = {"gate_up_proj": self.projections[:-1], "down_proj": self.projections[-1:]}
        if leaf not in parts:
            return [{leaf: None}]
        single: dict[str, ShardId] = {
            f"{expert}.{name}.weight": (expert, part)
            for expert in range(self.num_experts)
            for part, name in enumerate(parts[leaf])
        }
        return [{leaf: None}, single]

    def share_of(self, param: nn.Parameter, shard_id: ShardId) -> Share:
        """This rank's share of a tensor of one expert."""
        assert isinstance(shard_id, tuple)
        expert, part = shard_id
        return replace(self.shares_of(param)[part], table=expert - self.own.start)

    def shares_of(self, param: nn.Parameter) -> list[Share]:
        """This rank's share of each part of an expert's weight."""
        return self._down_shares if param is self.down_proj else self._gate_up_shares

    @property
    def _gate_up_shares(self) -> list[Share]:
        whole, size = (self.whole_size, self.hidden_size), self.size
        runs = [Run(self.tp_rank * size, size, part * size) for part in range(self.num_inputs)]
        return [Share(whole, (run,)) for run in runs]

    @property
    def _down_shares(self) -> list[Share]:
        whole = Share.of_all(self.hidden_size, self.whole_size)
        return [replace(whole, columns=(self.tp_rank * self.size, self.size))]

    def load_gate_up(
        self,
        param: nn.Parameter,
        loaded_weight: Stored | PackedExperts,
        shard_id: ShardId = None,
    ) -> None:
        """Keep this rank's rows of gate and up, of one expert or of all."""
        arrivals = self._arrivals(param, loaded_weight, shard_id, self._gate_up_shares)
        if param is self.gate_up_proj:
            weight_of(param).load(arrivals)
            return
        for bias, share in arrivals:
            assert isinstance(bias, torch.Tensor)
            share.copy_entries(bias, param.data[share.table])

    def load_down(
        self,
        param: nn.Parameter,
        loaded_weight: Stored | PackedExperts,
        shard_id: ShardId = None,
    ) -> None:
        """Keep this rank's columns, of one expert or of all."""
        arrivals = self._arrivals(param, loaded_weight, shard_id, self._down_shares)
        weight_of(param).load(arrivals)

    def _arrivals(
        self,
        param: nn.Parameter,
        loaded: Stored | PackedExperts,
        shard_id: ShardId,
        shares: Sequence[Share],
    ) -> Iterator[tuple[Stored, Share]]:
        """Tensors of one expert's parts, or of all experts, each with its share."""
        if shard_id is not None:
            assert isinstance(shard_id, tuple) and not isinstance(loaded, PackedExperts)
            expert, part = shard_id
            if expert in self.own:
                yield loaded, replace(shares[part], table=expert - self.own.start)
            return
        rows, columns = shares[0].shape
        tail = (columns,) if param is not self.gate_up_proj_bias else ()
        check_shape(loaded, (self.num_experts, len(shares) * rows, *tail))
        for expert, weight in enumerate(_one_by_one(loaded)):
            for part, share in enumerate(shares) if expert in self.own else ():
                table = expert - self.own.start
                yield weight.narrow(0, part * rows, rows), replace(share, table=table)

    def load_down_bias(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Load the bias, which only one rank adds."""
        check_shape(loaded_weight, (self.num_experts, self.hidden_size))
        param.data.copy_(loaded_weight[self.own.start : self.own.stop])
        if self.tp_rank:
            param.data.zero_()

    def compute(
        self,
        inputs: torch.Tensor,
        pairs: SortedPairs,
        factors: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the outputs of the pairs of this rank's experts. out: [pairs, hidden].

        factors: float32 [tokens, top_k], what multiplies the inputs, [tokens, hidden]; None:
        nothing does.
        """
        rows: torch.Tensor | None = pairs.tokens
        if factors is not None:
            by_pair = torch.empty_like(factors).flatten()
            by_pair[pairs.places.flatten()] = factors.flatten()
            inputs = (inputs.float()[pairs.tokens] * by_pair[:, None]).to(inputs.dtype)
            rows = None
        self(inputs, rows, pairs.starts, out, pairs.tokens)

    def forward(
        self,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        starts: torch.Tensor,
        out: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """x: [tokens, hidden]; rows, starts: see ``expert_linear``; out: [pairs, hidden]; tokens:
        int64 [pairs], the token of each. Pairs of another rank's experts are not written."""
        if self._is_spread:
            starts = starts[self.own.start : self.own.stop + 1]
            begin, end = int(starts[0]), int(starts[-1])
            starts = starts - begin
            out, tokens = out[begin:end], tokens[begin:end]
            if rows is None:
                x = x[begin:end]
            else:
                rows = rows[begin:end]
            if begin == end:
                return
        weights = [weight_of(each) for each in (self.gate_up_proj, self.down_proj)]
        is_adapted = any(each.is_adapted for each in weights) and current_adapters() is not None
        if not all(each.is_in_rows for each in weights):
            self._run_in_groups(x, rows, starts, out, tokens if is_adapted else None)
            return
        gate_up = x.new_empty((len(out), self.num_inputs * self.size))
        expert_linear(x, rows, starts, self.gate_up_proj, self.gate_up_proj_bias, gate_up)
        if is_adapted:
            self._adapt(weights[0], x, rows, starts, gate_up, tokens)
        inner = self.activation(gate_up)
        expert_linear(inner, None, starts, self.down_proj, self.down_proj_bias, out)
        if is_adapted:
            self._adapt(weights[1], inner, None, starts, out, tokens)

    def complete(self, out: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all pairs, from what each rank of this engine has of them."""
        if not self._is_spread:
            return tensor_model_parallel_all_reduce(out)
        ends = starts[self.bounds].tolist()
        counts = [end - begin for begin, end in pairwise(ends)]
        own = self._ranks.rank_in_group
        rows = get_tp_group().gather_rows(out[ends[own] : ends[own + 1]], counts)
        return torch.cat([rows, out[len(rows) :]]) if len(rows) < len(out) else rows

    def _adapt(
        self,
        weight: Weight,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        starts: torch.Tensor,
        out: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Add what adapters change in the products of all experts with one of the weights."""
        for expert, (begin, end) in enumerate(pairwise(starts.tolist())):
            if begin < end:
                own = x[begin:end] if rows is None else x[rows[begin:end]]
                with only_rows(tokens[begin:end]):
                    weight.adapt(own, out[begin:end], expert)

    def _run_in_groups(
        self,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        starts: torch.Tensor,
        out: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        """Run a few pairs after others, so what lies between their products stays in the caches.

        tokens: None: no token of the pass has an adapter of an expert.
        """
        groups = _groups(starts.tolist())
        most = max((group[-1].end - group[0].begin for group in groups), default=0)
        gathered = None if rows is None else x.new_empty((most, self.hidden_size))
        wide = x.new_empty((most, self.num_inputs * self.size))
        for group in groups:
            begin, end = group[0].begin, group[-1].end
            own, inner = x[begin:end], wide[: end - begin]
            if rows is not None and gathered is not None:
                own = torch.index_select(x, 0, rows[begin:end], out=gathered[: end - begin])
            there = None if tokens is None else tokens[begin:end]
            self._multiply(self.gate_up_proj, self.gate_up_proj_bias, group, own, inner, there)
            inner = self.activation(inner)
            own_out = out[begin:end]
            self._multiply(self.down_proj, self.down_proj_bias, group, inner, own_out, there)

    @staticmethod
    def _multiply(
        parameter: nn.Parameter,
        biases: torch.Tensor | None,
        group: Sequence[_Pairs],
        x: torch.Tensor,
        out: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        """Write the products of a group's experts with one weight. x, out, tokens: the group's."""
        weight, start = weight_of(parameter), group[0].begin
        for expert, begin, end in group:
            own = slice(begin - start, end - start)
            bias = None if biases is None else biases[expert]
            if tokens is None:
                weight.multiply_into(x[own], bias, out[own], expert)
                continue
            with only_rows(tokens[own]):
                weight.multiply_into(x[own], bias, out[own], expert)


class _Pairs(NamedTuple):
    """The pairs ``begin`` to ``end - 1``, which are those of one expert."""

    expert: int
    begin: int
    end: int


def _groups(starts: list[int]) -> list[list[_Pairs]]:
    """Divide the experts that have pairs: as many in a row as have few pairs together."""
    groups: list[list[_Pairs]] = []
    for expert, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        if not groups or end - groups[-1][0].begin > _PAIRS_OF_A_GROUP:
            groups.append([])
        groups[-1].append(_Pairs(expert, begin, end))
    return groups


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
