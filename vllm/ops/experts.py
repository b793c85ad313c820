"""Mixtures of experts: the choice of experts, their products, and the sum of their outputs.

A token and one of its experts are a *pair*. Pairs are sorted by expert, so that an expert's
tokens lie side by side; :func:`sort_by_expert` returns the place of each pair. No result of a token
depends on other tokens: scores and sums are formed row by row, products are those of
:func:`vllm.ops.linear.linear`, and a token's experts are added in the order of their rank.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from vllm.ops.linear import linear, panels_shape
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import sigmoid


@operation
def choose_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    by_sigmoid: bool,
    num_groups: int,
    num_groups_kept: int,
    group_best: int,
    renormalise: bool,
    scaling: float,
    weights: Written,
    experts: Written,
) -> None:
    """Choose the experts of every token, best first, and their weights.

    logits: float32 [tokens, num_experts]; scores are their softmax (Shazeer et al. 2017) or each
    one's sigmoid. correction: float32 [num_experts], added for the choice only (DeepSeek-V3).
    Neighbouring experts form ``num_groups`` groups. A group ranks by the sum of its ``group_best``
    best experts (DeepSeek-V3: 2, DeepSeek-V2: 1); the ``num_groups_kept`` best groups take part.
    weights: float32 [tokens, k], the scores of the chosen experts, if renormalised divided by their
    sum, times ``scaling``; experts: int64 [tokens, k]. The first of equal experts is better.
    Renormalised softmax is the softmax over the chosen logits.
    """
    if by_sigmoid:
        scores = sigmoid(logits)
    else:
        powers = torch.exp(logits - logits.amax(dim=1, keepdim=True))
        scores = powers / powers.sum(dim=1, keepdim=True)
    # Logits rank like their scores, but logits that are far apart can have equal scores.
    ranked = logits if correction is None and num_groups == 1 else scores
    if correction is not None:
        ranked = scores + correction
    if num_groups > 1:
        groups = ranked.view(len(ranked), num_groups, ranked.shape[1] // num_groups)
        ranked = _drop_groups(groups, num_groups_kept, group_best).flatten(1)
    experts.copy_(_best(ranked, experts.shape[1]))
    weights.copy_(scores.gather(1, experts))
    if renormalise:
        total = torch.zeros_like(weights[:, 0])
        for rank in range(weights.shape[1]):  # in order, which torch's sum does not promise
            total += weights[:, rank]
        weights /= total[:, None]
    weights *= scaling


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest values of each row, int64 [rows, count]."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _drop_groups(groups: torch.Tensor, num_kept: int, group_best: int) -> torch.Tensor:
    """Set all but the best groups to minus infinity. groups: [tokens, groups, experts]."""
    best = groups.sort(dim=2, descending=True).values[..., :group_best]
    kept = _best(best.sum(dim=2), num_kept)
    dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=groups.device)
    return groups.masked_fill(dropped.scatter_(1, kept, False)[..., None], float("-inf"))


@choose_experts.contract
def _(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_groups: int,
    num_groups_kept: int,
    group_best: int,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> None:
    tokens, num_experts = logits.shape
    assert logits.dtype is weights.dtype is torch.float32 and experts.dtype is torch.int64
    assert weights.shape == experts.shape == (tokens, experts.shape[1])
    assert 0 < experts.shape[1] <= num_experts // num_groups * num_groups_kept
    assert num_experts % num_groups == 0 and num_groups_kept <= num_groups and group_best > 0
    assert logits.is_contiguous() and weights.is_contiguous() and experts.is_contiguous()
    assert correction is None or (
        correction.shape == (num_experts,) and correction.dtype is torch.float32
    )


class SortedPairs(NamedTuple):
    """Pairs sorted by expert; pairs of one expert are in the order of their tokens."""

    tokens: torch.Tensor
    """int64 [pairs]: the token of each pair."""
    starts: torch.Tensor
    """int64 [num_experts + 1]: expert e has the pairs from ``starts[e]`` to ``starts[e + 1]``."""
    places: torch.Tensor
    """int64 [tokens, k]: the index of the pair of a token and its expert of that rank."""


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sort int64 [tokens, k], as written by :func:`choose_experts`. Does not wait for a device.

    Pairs of experts from ``num_experts`` on come last.
    """
    experts = experts.contiguous()
    pairs = SortedPairs(
        experts.new_empty(experts.numel()),
        experts.new_empty(num_experts + 1),
        torch.empty_like(experts),
    )
    sort_pairs(experts, *pairs)
    return pairs


@operation
def sort_pairs(experts: torch.Tensor, tokens: Written, starts: Written, places: Written) -> None:
    """Write the parts of :class:`SortedPairs`. experts: int64 [tokens, k], none negative."""
    chosen, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    places.view(-1).scatter_(0, order, numbers)
    boundaries = torch.arange(len(starts), device=experts.device)
    torch.searchsorted(chosen, boundaries, out=starts)
    torch.floor_divide(order, experts.shape[1], out=tokens)


@sort_pairs.contract
def _(
    experts: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, places: torch.Tensor
) -> None:
    assert experts.dtype is tokens.dtype is starts.dtype is places.dtype is torch.int64
    assert places.shape == experts.shape and tokens.shape == (experts.numel(),)
    assert all(each.is_contiguous() for each in (experts, tokens, starts, places))
    assert len(starts) > 0


@operation
def expert_linear(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: Written,
) -> None:
    """``out[p] = x[rows[p]] @ weight[e].T + bias[e]`` for the pairs p of each expert e.

    x: [tokens, n]; rows: int64 [pairs], None if x has a row for each pair; starts: int64
    [num_experts + 1], see :class:`SortedPairs`; weight: [num_experts, m, n] or the panels of
    each expert; bias: [num_experts, m]; out: [pairs, m], dense. Each expert's product is one
    :func:`linear`.
    """
    for expert, (begin, end) in enumerate(pairwise(starts.tolist())):
        if begin < end:
            added = None if bias is None else bias[expert]
            own = x[begin:end] if rows is None else torch.index_select(x, 0, rows[begin:end])
            linear(own, weight[expert], added, out[begin:end])


@expert_linear.contract
def _(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_experts, columns = len(starts) - 1, out.shape[1]
    assert x.dtype is weight.dtype is out.dtype and starts.dtype is torch.int64
    assert x.stride(1) == 1 and out.is_contiguous()
    assert len(x) == len(out) if rows is None else rows.shape == (len(out),)
    assert rows is None or rows.dtype is torch.int64
    assert weight.is_contiguous() and weight.shape == (
        (num_experts, columns, x.shape[1])
        if weight.dim() == 3
        else (num_experts, *panels_shape(columns, x.shape[1], weight.dtype))
    )
    assert bias is None or (bias.shape == (num_experts, columns) and bias.dtype is x.dtype)


@operation
def combine_experts(
    outputs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_weights: torch.Tensor | None,
    out: Written,
) -> None:
    """The shared output, if any, plus ``weights[t, j] * outputs[places[t, j]]``, rank j by rank.

    outputs: [pairs, n]; places: int64, weights: float32, both [tokens, k]; shared: [tokens, n], the
    start of the sum, times shared_weights (float32 [tokens]) if they are given; out: [tokens, n],
    dense. Everything is added in float32 and rounded once.
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if shared is not None:
        total += shared.float() if shared_weights is None else shared_weights[:, None] * shared
    for rank in range(places.shape[1]):
        total += weights[:, rank, None] * outputs[places[:, rank]].float()
    out.copy_(total)


@combine_experts.contract
def _(
    outputs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_weights: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    assert outputs.dtype is out.dtype and places.dtype is torch.int64 and out.is_contiguous()
    assert weights.dtype is torch.float32 and weights.shape == places.shape
    assert len(out) == len(places) and outputs.stride(1) == 1 and outputs.shape[1] == out.shape[1]
    assert places.is_contiguous() and weights.is_contiguous()
    assert shared is None or (
        shared.shape == out.shape and shared.dtype is out.dtype and shared.stride(1) == 1
    )
    assert shared_weights is None or (
        shared is not None
        and shared_weights.shape == (len(out),)
        and shared_weights.dtype is torch.float32
    )
