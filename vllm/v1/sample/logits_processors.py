"""Changes to one row of logits before a token is chosen: each in place, for that row alone.

Their order is upstream's: allowed tokens, bad words, minimum length, bias, penalties.
All of them apply to greedy requests, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.transfers import to_device
from vllm.v1.sample.metadata import SamplerRow, TokenIds

if TYPE_CHECKING:
    import numpy.typing as npt

_NEVER = float("-inf")


def edit_logits(logits: torch.Tensor, row: SamplerRow) -> None:
    """Apply all that ``row`` asks for to its logits, float32 [vocab]."""
    params, edits = row.sampling_params, row.edits
    allowed, biased, bias = edits.on(logits.device)
    if allowed is not None:
        keep_only(logits, allowed)
    if edits.bad_endings is not None:
        forbid(logits, edits.bad_endings.after(row.output_token_ids))
    if len(row.output_token_ids) < params.min_tokens:
        forbid(logits, params.all_stop_token_ids)
    if biased is not None and bias is not None:
        logits[biased] += bias
    apply_penalties(logits, params, row.prompt_token_ids, row.output_token_ids)


def keep_only(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    kept = logits[tokens]
    logits.fill_(_NEVER)
    logits[tokens] = kept


def forbid(logits: torch.Tensor, token_ids: Collection[int]) -> None:
    """Make these tokens impossible; ids beyond the vocabulary are ignored."""
    vocab_size = logits.shape[-1]
    tokens = [token for token in token_ids if token < vocab_size]
    if tokens:
        logits.index_fill_(0, _on_device(logits, tokens, np.int64), _NEVER)


def apply_penalties(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: TokenIds,
    output_token_ids: TokenIds,
) -> None:
    """Repetition penalty (Keskar et al. 2019), then frequency and presence penalty.

    The first counts prompt and output; it divides positive logits and multiplies others.
    The other two count the output alone: ``frequency * count + presence`` is subtracted.
    """
    output = np.asarray(output_token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        prompt = np.asarray(prompt_token_ids, dtype=np.int64)
        seen = _on_device(logits, np.unique(np.concatenate([prompt, output])), np.int64)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(output, return_counts=True)
        amounts = params.frequency_penalty * counts + params.presence_penalty
        index = _on_device(logits, tokens, np.int64)
        logits[index] -= _on_device(logits, amounts, np.float32)


def _on_device(
    logits: torch.Tensor, values: npt.ArrayLike, dtype: type[np.int64 | np.float32]
) -> torch.Tensor:
    return to_device(np.asarray(values, dtype=dtype), logits.device)
