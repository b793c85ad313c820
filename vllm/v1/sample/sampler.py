"""Logits to tokens: edits, then the most likely token or a draw, and log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import nn

from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processors import edit_logits
from vllm.v1.sample.logprobs import gather_logprobs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.random_sampling import sample_randomly


class SamplerOutput(NamedTuple):
    """One token a row; ``logprobs[row]``, of one position, where the row asked for them."""

    sampled_token_ids: list[int]
    logprobs: list[LogprobsLists | None]


class Sampler(nn.Module):
    """Stateless: what a row gives depends on its logits, settings, history and generator."""

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for every row.

        Args:
            logits: [rows, vocab], any float dtype; not changed.
            metadata: one row for each of them.

        Log-probabilities are those of the model: of the logits before temperature,
        penalties and the other edits.
        """
        assert len(logits) == len(metadata.rows), "one metadata row for each row of the logits"
        raw = logits.float()
        edited = self._edit(raw, metadata) if metadata.edited_rows else raw
        sampled = self._choose(edited, metadata)
        return SamplerOutput(sampled, self._logprobs(raw, sampled, metadata))

    def _edit(self, raw: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        edited = raw.clone()
        for index in metadata.edited_rows:
            edit_logits(edited[index], metadata.rows[index])
        return edited

    def _choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> list[int]:
        num_random = len(metadata.random_rows)
        sampled: list[int] = [0] * len(logits)
        if num_random < len(logits):
            sampled = logits.argmax(dim=-1).tolist()
        if num_random:
            rows = [metadata.rows[index] for index in metadata.random_rows]
            tokens = sample_randomly(logits[metadata.random_index], rows)
            for index, token in zip(metadata.random_rows, tokens, strict=True):
                sampled[index] = token
        return sampled

    def _logprobs(
        self, raw: torch.Tensor, sampled: list[int], metadata: SamplingMetadata
    ) -> list[LogprobsLists | None]:
        # Rows of one k together: which of equal logits are among the k may depend on k.
        rows_of_k: dict[int, list[int]] = defaultdict(list)
        for index, k in metadata.num_logprobs.items():
            rows_of_k[k].append(index)
        logprobs: list[LogprobsLists | None] = [None] * len(sampled)
        for k, members in rows_of_k.items():
            select = torch.tensor(members, device=raw.device)
            tokens = torch.tensor([sampled[index] for index in members], device=raw.device)
            lists = gather_logprobs(raw[select], tokens, k)
            for position, index in enumerate(members):
                logprobs[index] = LogprobsLists(
                    token_ids=[lists.token_ids[position]],
                    logprobs=[lists.logprobs[position]],
                    ranks=[lists.ranks[position]],
                )
        return logprobs


__all__ = ["Sampler", "SamplerOutput"]
