"""Batches of samples, for ``DataLoader(dataset, collate_fn=...)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm.hidden_states.dataset import RowBatch, join_batches, rows_of
from vllm.hidden_states.sample import HiddenStatesSample


class PaddedBatch(NamedTuple):
    """Samples side by side, short ones filled up with zeros at their end."""

    rows: torch.Tensor
    """[samples, most rows, layers, hidden]"""
    token_ids: torch.Tensor
    """int64 [samples, most rows], of the tokens that the rows belong to"""
    positions: torch.Tensor
    """int64 [samples, most rows], of those tokens in their samples"""
    mask: torch.Tensor
    """bool [samples, most rows]: there is a row"""
    samples: torch.Tensor
    """int64 [samples], their ``index``"""


def pack_samples(samples: Sequence[HiddenStatesSample]) -> RowBatch:
    """All rows one after the other; ``RowBatch.samples`` tells whose they are."""
    return join_batches([rows_of(sample) for sample in samples])


def pad_samples(samples: Sequence[HiddenStatesSample]) -> PaddedBatch:
    """A sample a line, as long as the longest."""
    parts = [rows_of(sample) for sample in samples]
    rows, token_ids, positions, mask = (
        pad_sequence(column, batch_first=True)
        for column in (
            [part.rows for part in parts],
            [part.token_ids for part in parts],
            [part.positions for part in parts],
            [torch.ones(len(part.rows), dtype=torch.bool) for part in parts],
        )
    )
    indices = torch.tensor([sample.index for sample in samples])
    return PaddedBatch(rows, token_ids, positions, mask, indices)
