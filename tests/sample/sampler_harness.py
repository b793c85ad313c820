"""Rows for the sampler, and twins of its steps that loop over one token after another."""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import LogitEdits, SamplerRow, SamplingMetadata, takes_most_likely
from vllm.v1.sample.sampler import Sampler, SamplerOutput


def make_row(
    prompt: list[int] | None = None, output: list[int] | None = None, **settings: Any
) -> SamplerRow:
    """A row with a fresh generator of its seed (0 by default)."""
    params = SamplingParams(**settings)
    generator = None if params.is_greedy else torch.Generator().manual_seed(params.seed or 0)
    return SamplerRow(params, prompt or [1], output or [], LogitEdits(params), generator)


def run(logits: torch.Tensor, rows: list[SamplerRow]) -> SamplerOutput:
    output = Sampler()(logits, SamplingMetadata.from_rows(rows)).result()
    if all(takes_most_likely(row.sampling_params) for row in rows):
        assert Sampler().most_likely(logits).result() == output
    return output


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(value - largest) for value in logits]
    return [weight / sum(weights) for weight in weights]


def naive_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k, top-p, in that order."""
    scaled = [value / params.temperature for value in logits]
    probabilities = softmax(scaled)
    limit = params.min_p * max(probabilities)
    kept = {token for token, p in enumerate(probabilities) if p >= limit}
    by_rank = sorted(kept, key=lambda token: -probabilities[token])
    if params.top_k > 0:
        by_rank = by_rank[: params.top_k]
    mass = sum(probabilities[token] for token in by_rank)
    nucleus, reached = [], 0.0
    for token in by_rank:
        nucleus.append(token)
        reached += probabilities[token] / mass
        if reached >= params.top_p:
            break
    total = sum(probabilities[token] for token in nucleus)
    return [
        probabilities[token] / total if token in nucleus else 0.0 for token in range(len(logits))
    ]
