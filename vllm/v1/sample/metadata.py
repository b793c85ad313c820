"""Settings and history of each row of a batch of logits, for the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.transfers import to_device

if TYPE_CHECKING:
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


class BadEndings:
    """Token sequences that must not appear in an output, by what precedes their last token.

    A step looks up one tuple for each length of a sequence, however many sequences there are.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._last_by_start: dict[tuple[int, ...], set[int]] = {}
        for *start, last in sequences:
            self._last_by_start.setdefault(tuple(start), set()).add(last)
        self._lengths = sorted({len(start) for start in self._last_by_start})

    def after(self, output_token_ids: TokenIds) -> set[int]:
        """Return the tokens that would complete a sequence at the end of this output."""
        length = self._lengths[-1]
        end = tuple(np.asarray(output_token_ids[-length:] if length else (), np.int64).tolist())
        found: set[int] = set()
        for count in self._lengths:
            if count <= len(end):
                found |= self._last_by_start.get(end[len(end) - count :], set())
        return found


class LogitEdits:
    """The settings of a request that change its logits at every token, prepared once."""

    def __init__(self, params: SamplingParams) -> None:
        sequences = params.bad_words_token_ids
        self.bad_endings = BadEndings(sequences) if sequences else None
        allowed, bias = params.allowed_token_ids, params.logit_bias
        self._arrays = (
            np.asarray(allowed, np.int64) if allowed else None,
            np.asarray(list(bias), np.int64) if bias else None,
            np.asarray(list(bias.values()), np.float32) if bias else None,
        )
        self._tensors: tuple[torch.Tensor | None, ...] | None = None

    def on(self, device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """Return allowed tokens, tokens with a bias, and their bias on the device of the logits,
        the same at each call."""
        if self._tensors is None:
            arrays = self._arrays
            self._tensors = tuple(None if x is None else to_device(x, device) for x in arrays)
        return self._tensors


@dataclass(frozen=True)
class SamplerRow:
    """One row of the logits: the request that samples its next token there.

    ``generator`` is the request's own, on the device of the logits, and keeps its state
    from token to token; greedy requests need none.
    """

    sampling_params: SamplingParams
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    edits: LogitEdits
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class SamplingMetadata:
    """The rows of one batch, sorted by what has to be done for them."""

    rows: tuple[SamplerRow, ...]
    edited_rows: tuple[int, ...]
    """Rows whose logits are changed before a token is chosen."""
    random_rows: tuple[int, ...]
    num_logprobs: dict[int, int]
    """Row -> number of most likely tokens to report beside the sampled one."""

    @classmethod
    def from_rows(cls, rows: Sequence[SamplerRow]) -> Self:
        """Sort ``rows``; row i belongs to row i of the logits."""
        edited, random, num_logprobs = [], [], {}
        for index, row in enumerate(rows):
            params = row.sampling_params
            if _changes_logits(params, len(row.output_token_ids)):
                edited.append(index)
            if not params.is_greedy:
                assert row.generator is not None, f"row {index} samples without a generator"
                random.append(index)
            if params.logprobs is not None:
                num_logprobs[index] = params.logprobs
        return cls(tuple(rows), tuple(edited), tuple(random), num_logprobs)


def takes_most_likely(params: SamplingParams) -> bool:
    """Return whether rows with these settings always give just their most likely token."""
    return params.is_greedy and params.logprobs is None and not _changes_logits(params, 0)


def _changes_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words_token_ids
        or num_output_tokens < params.min_tokens
    )
