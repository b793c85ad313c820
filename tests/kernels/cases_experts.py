"""Cases of mixtures of experts: odd numbers of experts, some without tokens, no tokens at all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import strided
from operation_cases import Case, cases

from vllm.ops.experts import sort_by_expert
from vllm.ops.linear import make_panels


def _nan(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@cases
def choose_experts(dtype: torch.dtype) -> Iterator[Case]:
    if dtype is not torch.float32:
        return
    for tokens, num_experts, top_k in ((0, 4, 2), (1, 1, 1), (5, 7, 7), (33, 60, 4), (9, 256, 8)):
        logits, correction = 3 * torch.randn(tokens, num_experts), torch.randn(num_experts)
        logits[:, num_experts // 2 :] = logits[:, : num_experts - num_experts // 2]  # equals
        groups = 4 if num_experts % 4 == 0 else 1
        for given, by_sigmoid, kept in (
            (None, False, groups),
            (correction, True, (groups + 1) // 2),
        ):
            if top_k > num_experts // groups * kept:
                continue
            rule = (by_sigmoid, groups, kept, 1 + by_sigmoid, by_sigmoid, 1.5)
            out = (_nan((tokens, top_k)), torch.full((tokens, top_k), -7))
            yield Case((logits, given, *rule, *out), 2e-6, ("weights", "experts"))


def _chosen(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """int64 [tokens, top_k]: experts of which the last one is never chosen."""
    rows = [torch.randperm(max(1, num_experts - 1))[:top_k] for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.zeros(0, top_k, dtype=torch.int64)


@cases
def sort_pairs(dtype: torch.dtype) -> Iterator[Case]:
    if dtype is not torch.float32:
        return
    for tokens, num_experts, top_k, num_bounds in (
        (0, 3, 1, 4),
        (1, 1, 1, 2),
        (40, 6, 3, 7),
        (33, 9, 4, 6),  # experts beyond the bounds come last
        (300, 70, 8, 71),
    ):
        chosen = _chosen(tokens, num_experts, top_k)
        out = [torch.full(size, -7) for size in ((chosen.numel(),), (num_bounds,), chosen.shape)]
        yield Case((chosen, *out), 0.0, ("tokens", "starts", "places"))


@cases
def expert_linear(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num_experts, top_k, terms, columns in (
        (0, 3, 1, 8, 8),
        (1, 1, 1, 5, 3),
        (40, 6, 3, 33, 70),
    ):
        pairs = sort_by_expert(_chosen(tokens, num_experts, top_k), num_experts)
        x = strided(torch.randn(tokens, terms).to(dtype))
        weight = (torch.randn(num_experts, columns, terms) / terms**0.5).to(dtype)
        bias = torch.randn(num_experts, columns).to(dtype)
        panels = torch.stack([make_panels(each) for each in weight])
        for given in (weight, panels):
            for added in (None, bias):
                out = _nan((len(pairs.tokens), columns), dtype)
                yield Case((x, pairs.tokens, pairs.starts, given, added, out), 2e-6)
        by_pair = x[pairs.tokens]
        yield Case((by_pair, None, pairs.starts, weight, None, out.clone()), 2e-6)


@cases
def combine_experts(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, top_k, size in ((0, 2, 8), (1, 1, 3), (40, 3, 33), (7, 8, 130)):
        pairs = sort_by_expert(_chosen(tokens, 10, top_k), 10)
        outputs = torch.randn(len(pairs.tokens), size).to(dtype)
        weights, shared = torch.rand(tokens, top_k), torch.randn(tokens, size).to(dtype)
        for given, scaled in ((None, None), (shared, None), (shared, torch.rand(tokens))):
            out = _nan((tokens, size), dtype)
            yield Case((outputs, pairs.places, weights, given, scaled, out), 2e-6)
