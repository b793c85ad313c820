"""Changes to one row of logits before a token is chosen: each in place, for that row alone.

Their order is upstream's: which tokens are allowed, bad words, minimum length, bias,
penalties. All of them hold for greedy requests too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplerRow, TokenIds

_NEVER = float("-inf")


def edit_logits(logits: torch.Tensor, row: SamplerRow) -> None:
    """Apply all that ``row`` asks for to its logits, float32 [vocab]."""
    params = row.sampling_params
    if params.allowed_token_ids:
        keep_only(logits, params.allowed_token_ids)
    if params.bad_words_token_ids:
        forbid(logits, set(last_tokens(params.bad_words_token_ids, row.output_token_ids)))
    if len(row.output_token_ids) < params.min_tokens:
        forbid(logits, params.all_stop_token_ids)
    if params.logit_bias:
        tokens = _index(logits, list(params.logit_bias))
        logits[tokens] += logits.new_tensor(list(params.logit_bias.values()))
    apply_penalties(logits, params, row.prompt_token_ids, row.output_token_ids)


def keep_only(logits: torch.Tensor, token_ids: Collection[int]) -> None:
    """Make every other token impossible."""
    tokens = _index(logits, token_ids)
    kept = logits[tokens]
    logits.fill_(_NEVER)
    logits[tokens] = kept


def forbid(logits: torch.Tensor, token_ids: Collection[int]) -> None:
    """Make these tokens impossible; ids beyond the vocabulary are."""
    vocab_size = logits.shape[-1]
    tokens = [token for token in token_ids if token < vocab_size]
    if tokens:
        logits[_index(logits, tokens)] = _NEVER


def last_tokens(sequences: Sequence[Sequence[int]], output_token_ids: TokenIds) -> Iterator[int]:
    """The tokens that would complete one of ``sequences`` at the end of the output."""
    for *start, last in sequences:
        if not start or list(output_token_ids[-len(start) :]) == start:
            yield last


def apply_penalties(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: TokenIds,
    output_token_ids: TokenIds,
) -> None:
    """Repetition penalty (Keskar et al. 2019), then frequency and presence penalty.

    The first counts prompt and output; it divides positive logits and multiplies others.
    The other two count the output alone: ``frequency * count + presence`` is taken off.
    """
    output = np.asarray(output_token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        prompt = np.asarray(prompt_token_ids, dtype=np.int64)
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, output]))).to(logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(output, return_counts=True)
        amounts = params.frequency_penalty * counts + params.presence_penalty
        index = torch.from_numpy(tokens).to(logits.device)
        logits[index] -= torch.from_numpy(amounts).to(logits)


def _index(logits: torch.Tensor, token_ids: Collection[int]) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)


__all__ = ["apply_penalties", "edit_logits", "forbid", "keep_only", "last_tokens"]
