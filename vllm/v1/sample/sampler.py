"""Sampling from logits: edits, then the most likely token or a draw, and log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import nn

from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.sampling import most_likely
from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processors import edit_logits
from vllm.v1.sample.logprobs import PendingLogprobs, gather_logprobs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.random_sampling import processed_logits, sample_randomly


class SamplerOutput(NamedTuple):
    """One token per row; ``logprobs[row]``, of one position, if the row asked for them."""

    sampled_token_ids: list[int]
    logprobs: list[LogprobsLists | None]
    is_finite: list[bool]
    """True if the row's largest logit is finite; otherwise its token is meaningless."""


class PendingSample(NamedTuple):
    """A :class:`SamplerOutput` on its way to the host."""

    token_ids: torch.Tensor
    """int64 [rows], on the device of the logits."""
    on_host: HostCopy
    """int64 [2, rows]: the tokens, and whether the largest logits are finite."""
    logprobs: list[tuple[list[int], PendingLogprobs]]
    """Rows, and their log-probabilities."""

    @classmethod
    def of_tokens(cls, token_ids: torch.Tensor) -> Self:
        """Make one of tokens that were sampled elsewhere."""
        return cls(token_ids, HostCopy(torch.stack([token_ids, torch.ones_like(token_ids)])), [])

    def result(self) -> SamplerOutput:
        token_ids, is_finite = self.on_host.result().tolist()
        logprobs: list[LogprobsLists | None] = [None] * len(token_ids)
        for rows, pending in self.logprobs:
            lists = pending.result()
            for place, row in enumerate(rows):
                one = slice(place, place + 1)
                logprobs[row] = LogprobsLists(
                    lists.token_ids[one], lists.logprobs[one], lists.ranks[one]
                )
        return SamplerOutput(token_ids, logprobs, list(map(bool, is_finite)))


class Sampler(nn.Module):
    """Has no state: a row's result depends on its logits, settings, history and generator.

    reports_processed: log-probabilities come from the edited logits, after temperature and cuts.
    """

    def __init__(self, *, reports_processed: bool = False) -> None:
        super().__init__()
        self._reports_processed = reports_processed

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> PendingSample:
        """Choose a token for every row, without waiting for the device.

        Args:
            logits: [rows, vocab], any float dtype; not changed.
            metadata: one row for each row of the logits.

        Log-probabilities are the model's, unless ``reports_processed``: they come from the logits
        before temperature, penalties and the other edits.
        """
        assert len(logits) == len(metadata.rows), "one metadata row for each row of the logits"
        edited = logits.to(torch.float32, copy=True) if metadata.edited_rows else logits
        for index in metadata.edited_rows:
            edit_logits(edited[index], metadata.rows[index])
        likely = sampled = _most_likely(edited)
        if metadata.random_rows:
            sampled = self._draw(edited, likely.clone(), metadata)
        on_host = _with_largest(sampled, edited, likely)
        reported = edited if self._reports_processed else logits
        return PendingSample(sampled, on_host, self._logprobs(reported, sampled, metadata))

    def most_likely(self, logits: torch.Tensor) -> PendingSample:
        """Choose for rows that ask for no more (:func:`takes_most_likely`). logits: as above."""
        sampled = _most_likely(logits)
        return PendingSample(sampled, _with_largest(sampled, logits, sampled), [])

    @staticmethod
    def _draw(
        logits: torch.Tensor, sampled: torch.Tensor, metadata: SamplingMetadata
    ) -> torch.Tensor:
        """Return ``sampled``, int64 [rows], with drawn tokens for the rows that want them."""
        rows = [metadata.rows[index] for index in metadata.random_rows]
        select = to_device(np.array(metadata.random_rows), logits.device)
        sampled[select] = sample_randomly(logits[select].float(), rows)
        return sampled

    def _logprobs(
        self, logits: torch.Tensor, sampled: torch.Tensor, metadata: SamplingMetadata
    ) -> list[tuple[list[int], PendingLogprobs]]:
        # Rows of one k together: k may decide which of several equal logits are among the k.
        rows_of_k: dict[int, list[int]] = defaultdict(list)
        for index, k in metadata.num_logprobs.items():
            rows_of_k[k].append(index)
        pending = []
        for k, members in rows_of_k.items():
            select = to_device(np.array(members), logits.device)
            reported = logits[select]
            if self._reports_processed:
                reported = processed_logits(reported, [metadata.rows[one] for one in members])
            pending.append((members, gather_logprobs(reported, sampled[select], k)))
        return pending


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Most likely tokens, int64 [rows]; third-party models' logits have any dtype and layout."""
    if logits.stride(1) != 1 or logits.dtype not in KERNEL_DTYPES:
        return logits.argmax(dim=-1)
    sampled = logits.new_empty(len(logits), dtype=torch.int64)
    most_likely(logits, sampled)
    return sampled


def _with_largest(sampled: torch.Tensor, logits: torch.Tensor, likely: torch.Tensor) -> HostCopy:
    """Copy each row's token to the host, and whether the logit of its most likely token is finite.
    In a row with NaN, the most likely token is that of the NaN."""
    is_finite = logits.gather(1, likely.unsqueeze(1)).squeeze(1).isfinite()
    return HostCopy(torch.stack((sampled, is_finite.to(sampled.dtype))))
