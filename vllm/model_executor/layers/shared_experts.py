"""The exchange of tokens and outputs at experts that are spread over several engines.

    tokens of all engines  -->  experts of this rank  -->  outputs for this engine's tokens

Every rank gets the tokens of all engines, and computes those of its experts. The outputs go back as
they are, one for each pair of a token and an expert, so their engine adds them up in the order that
it has alone. Nothing that an engine gets depends on the tokens of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from vllm.distributed.engine_group import EngineGroup
from vllm.model_executor.layers.experts import Experts
from vllm.ops.experts import SortedPairs, sort_by_expert


class RoutedTokens(NamedTuple):
    """Tokens with the experts that were chosen for them."""

    inputs: torch.Tensor
    """[tokens, hidden]"""
    chosen: torch.Tensor
    """int64 [tokens, top_k]"""
    factors: torch.Tensor | None
    """float32 [tokens, top_k]: what multiplies the inputs; None: nothing does."""


class SharedExperts:
    """The experts of one layer on all ranks of all engines."""

    def __init__(
        self, experts: Experts, group: EngineGroup, top_k: int, *, weighs_input: bool
    ) -> None:
        self._experts, self._group, self._top_k = experts, group, top_k
        self._weighs_input = weighs_input

    def serve(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        """Take part in a round without tokens."""
        empty = torch.empty((0, self._top_k))
        factors = empty if self._weighs_input else None
        inputs = torch.empty((0, self._experts.hidden_size), dtype=dtype)
        self.outputs(RoutedTokens(inputs, empty.to(torch.int64), factors), counts)

    def outputs(self, own: RoutedTokens, counts: Sequence[int]) -> torch.Tensor:
        """Return the outputs of this engine's pairs, [pairs, hidden], in the order of
        ``sort_by_expert``; those of identity experts are not written.

        counts: the tokens of each engine in this round.
        """
        tokens = self._gather(own, counts)
        pairs = sort_by_expert(tokens.chosen, self._experts.num_experts)
        by_pair = own.inputs.new_empty((len(pairs.tokens), self._experts.hidden_size))
        self._experts.compute(tokens.inputs, pairs, tokens.factors, by_pair)
        return self._hand_back(by_pair, pairs, counts)

    def _gather(self, own: RoutedTokens, counts: Sequence[int]) -> RoutedTokens:
        """Return the tokens of all engines, one engine after another.

        The ranks of an engine have the same tokens, of which each hands out some.
        """
        group, size = self._group, self._group.ranks_per_engine
        bounds = [
            [start + count * rank // size for rank in range(size)]
            for start, count in zip(accumulate(counts, initial=0), counts, strict=False)
        ]
        starts = [*(start for engine in bounds for start in engine), sum(counts)]
        first = starts[group.engine * size]
        share = slice(starts[group.rank] - first, starts[group.rank + 1] - first)
        columns = [own.chosen.to(torch.int32), own.factors, own.inputs.contiguous()]
        packed = torch.cat([c[share].view(torch.uint8) for c in columns if c is not None], dim=1)
        whole = packed.new_empty((sum(counts), packed.shape[1]))
        for rank, start, rows in group.exchange_rows(packed, [b - a for a, b in pairwise(starts)]):
            begin = starts[rank] + start
            whole[begin : begin + len(rows)] = rows
        sizes = [0 if c is None else c.shape[1] * c.element_size() for c in columns]
        chosen, factors, inputs = (part.contiguous() for part in torch.split(whole, sizes, dim=1))
        return RoutedTokens(
            inputs.view(own.inputs.dtype),
            chosen.view(torch.int32).to(torch.int64),
            None if own.factors is None else factors.view(torch.float32),
        )

    def _hand_back(
        self, by_pair: torch.Tensor, pairs: SortedPairs, counts: Sequence[int]
    ) -> torch.Tensor:
        """Give each engine the outputs of its pairs, which keep their order; returns this one's."""
        group = self._group
        ends = pairs.starts[self._experts.bounds].tolist()
        first = sum(counts[: group.engine])
        is_own = (pairs.tokens >= first) & (pairs.tokens < first + counts[group.engine])
        own = is_own.nonzero().flatten()
        result = by_pair.new_empty((len(own), by_pair.shape[1]))
        rows_here = by_pair[ends[group.rank] : ends[group.rank + 1]]
        sizes = [end - begin for begin, end in pairwise(ends)]
        for rank, start, rows in group.exchange_rows(rows_here, sizes):
            begin = ends[rank] + start
            place = torch.tensor([begin, begin + len(rows)])
            low, high = torch.searchsorted(own, place).tolist()
            torch.index_select(rows, 0, own[low:high] - begin, out=result[low:high])
        return result
