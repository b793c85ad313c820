"""Random choice of tokens: min-p, top-k and top-p, then one draw per row.

Rows are processed together where that does not affect their results: every operation here
works element by element or along a row, and a row's own settings decide which rows share a
tensor with it. So a row's token depends only on its logits, its settings and its generator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.utils.transfers import to_device
from vllm.v1.sample.metadata import SamplerRow

_FIRST_NUCLEUS = 1024
"""Number of candidates to look for a nucleus in, before the whole vocabulary is sorted."""
_SMALLEST_NOISE = 1e-30


class Candidates(NamedTuple):
    """Tokens that may be drawn, most likely first; both [rows, candidates].

    ``token_ids`` None: the candidates are the vocabulary, in its own order.
    """

    probabilities: torch.Tensor
    token_ids: torch.Tensor | None


def sample_randomly(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Draw one token per row, int64 [rows]. logits: float32 [rows, vocab], may be overwritten."""
    logits.div_(_column(logits, [row.sampling_params.temperature for row in rows]))
    min_p = [row.sampling_params.min_p for row in rows]
    if any(min_p):
        mask_unlikely(logits, min_p)
    vocab_size = logits.shape[-1]
    sampled = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for (k, has_top_p), members in _by_shape(rows, vocab_size).items():
        index = to_device(np.array(members), logits.device)
        group = logits[index]
        group_rows = [rows[index] for index in members]
        top_p = [row.sampling_params.top_p for row in group_rows]
        if k < vocab_size:
            values, ids = group.topk(k)
            candidates = Candidates(values.softmax(dim=-1), ids)
            if has_top_p:
                candidates = candidates._replace(
                    probabilities=keep_nucleus(candidates.probabilities, top_p)
                )
            tokens = draw(candidates, group_rows)
        elif has_top_p:
            tokens = _draw_from_nucleus(group.softmax(dim=-1), top_p, group_rows)
        else:
            tokens = draw(Candidates(group.softmax(dim=-1), None), group_rows)
        sampled[index] = tokens
    return sampled


def processed_logits(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Return the logits of the distributions that tokens are drawn from, -inf for all others.

    logits: float [rows, vocab], not changed. Rows that take the most likely token keep theirs.
    """
    found = logits.to(torch.float32, copy=True)
    for logit, row in zip(found, rows, strict=True):
        params = row.sampling_params
        if params.is_greedy:
            continue
        logit /= params.temperature
        if params.min_p:
            mask_unlikely(logit[None], [params.min_p])
        k = params.top_k if 0 < params.top_k < len(logit) else len(logit)
        if k == len(logit) and params.top_p >= 1.0:
            continue
        values, ids = logit.sort(descending=True, stable=True) if k == len(logit) else logit.topk(k)
        probabilities = values.softmax(dim=-1)[None]
        kept = ids[keep_nucleus(probabilities, [params.top_p])[0] > 0]
        logit.copy_(torch.full_like(logit, -math.inf).index_copy_(0, kept, logit[kept]))
    return found


def _by_shape(rows: Sequence[SamplerRow], vocab_size: int) -> dict[tuple[int, bool], list[int]]:
    """Group row indices by (number of candidates, whether top-p cuts them)."""
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        params = row.sampling_params
        k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        groups[k, params.top_p < 1.0].append(index)
    return groups


def mask_unlikely(logits: torch.Tensor, min_p: Sequence[float]) -> None:
    """Drop tokens less likely than ``min_p`` times the most likely one. In place."""
    # exp(logit - largest) is the probability divided by the largest probability
    margin = [math.log(value) if value else -math.inf for value in min_p]
    threshold = logits.amax(dim=-1, keepdim=True) + _column(logits, margin)
    logits.masked_fill_(logits < threshold, -math.inf)


def keep_nucleus(probabilities: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Zero all but the fewest most likely candidates that together reach ``top_p``.

    probabilities: [rows, candidates], falling along a row (Holtzman et al. 2020).
    """
    exact = probabilities.double()
    mass_before = exact.cumsum(dim=-1) - exact
    limit = _column(exact, top_p)
    return probabilities.masked_fill(mass_before >= limit, 0.0)


def _draw_from_nucleus(
    probabilities: torch.Tensor, top_p: Sequence[float], rows: Sequence[SamplerRow]
) -> torch.Tensor:
    """Draw by top-p from the whole vocabulary; a CPU sorts it only for rows of a wide nucleus."""
    narrow: list[int] = []
    width = min(_FIRST_NUCLEUS, probabilities.shape[-1])
    if probabilities.device.type == "cpu":  # others sort fast, and tolist() would wait for them
        values, ids = probabilities.topk(width)
        mass = values.double().cumsum(dim=-1)[:, -1].tolist()
        narrow = [
            index
            for index, (reached, limit) in enumerate(zip(mass, top_p, strict=True))
            if reached >= limit or width == probabilities.shape[-1]
        ]
    wide = sorted(set(range(len(rows))) - set(narrow))
    sampled = torch.empty(len(rows), dtype=torch.int64, device=probabilities.device)
    for members, is_narrow in ((narrow, True), (wide, False)):
        if not members:
            continue
        select = to_device(np.array(members), probabilities.device)
        if is_narrow:
            group, group_ids = values[select], ids[select]
        else:
            group, group_ids = probabilities[select].sort(dim=-1, descending=True, stable=True)
        nucleus = keep_nucleus(group, [top_p[index] for index in members])
        sampled[select] = draw(Candidates(nucleus, group_ids), [rows[index] for index in members])
    return sampled


def draw(candidates: Candidates, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Draw one token per row, int64 [rows], by probabilities that need not sum to 1.

    The token is the first of exponential clocks that run at these rates: argmax of
    p / Exp(1). Each row's clocks come from its own generator.
    """
    noise = torch.empty_like(candidates.probabilities)
    for index, row in enumerate(rows):
        # Drawn into separate memory: the place of a row must not matter.
        one = torch.empty_like(noise[index])
        noise[index] = one.exponential_(generator=row.generator)
    chosen = (candidates.probabilities / noise.clamp_min_(_SMALLEST_NOISE)).argmax(dim=-1)
    if candidates.token_ids is not None:
        chosen = candidates.token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    return chosen


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    dtype = np.float64 if like.dtype is torch.float64 else np.float32
    return to_device(np.array(values, dtype=dtype), like.device).unsqueeze(1)
