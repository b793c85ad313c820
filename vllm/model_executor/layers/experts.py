"""The weights of a layer's experts, and their products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

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
from vllm.forward_context import current_adapters, only_rows
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import ShardId, divide
from vllm.model_executor.layers.quantization.at_load import quantise_of_current_config
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.layers.weight_share import Run, Share, Stored
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.experts import (
    SortedPairs,
    expert_linear,
)
from vllm.ops.packed_linear import PackedExperts, PackedWeight

_PAIRS_OF_A_GROUP = 128
"""Pairs that are gathered and activated together if they belong to several experts."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's weights in most checkpoints; two names mean that it has no gate."""


def _one_by_one(weights: Stored | PackedExperts) -> Iterable[Stored]:
    assert not isinstance(weights, PackedWeight)
    return weights.weights if isinstance(weights, PackedExperts) else weights.unbind()


def _spreads_experts() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.enable_expert_parallel


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
        gate_up, down = weight_of(self.gate_up_proj), weight_of(self.down_proj)
        is_adapted = (gate_up.is_adapted or down.is_adapted) and current_adapters() is not None
        if len(out) <= _PAIRS_OF_A_GROUP:
            in_one_call = not (gate_up.has_codes or down.has_codes)
        else:
            in_one_call = gate_up.is_in_rows and down.is_in_rows
        if not in_one_call:
            self._run_in_groups(x, rows, starts, out, tokens if is_adapted else None)
            return
        wide = x.new_empty((len(out), self.num_inputs * self.size))
        expert_linear(x, rows, starts, self.gate_up_proj, self.gate_up_proj_bias, wide)
        if is_adapted:
            self._adapt(gate_up, x, rows, starts, wide, tokens)
        inner = self.activation(wide)
        expert_linear(inner, None, starts, self.down_proj, self.down_proj_bias, out)
        if is_adapted:
            self._adapt(down, inner, None, starts, out, tokens)

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
