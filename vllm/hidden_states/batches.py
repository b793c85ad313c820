"""Batches of rows from several samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data._utils.collate import default_collate_fn_map

from vllm.hidden_states.sample import HiddenStatesSample
from vllm.v1.rows.fields import LOSS_MASK


class RowBatch(NamedTuple):
    """Rows of one or several samples."""

    rows: torch.Tensor
    """[rows, layers, hidden]"""
    token_ids: torch.Tensor
    """int64 [rows], ids of the tokens that the rows belong to"""
    positions: torch.Tensor
    """int64 [rows], positions of these tokens in their samples"""
    samples: torch.Tensor
    """int64 [rows], the ``index`` of their samples"""
    tensors: dict[str, torch.Tensor]
    """The other tensors that all these samples have, [rows, ...] each."""
    columns: dict[str, list[Any]]
    """The columns that were kept, one value for each row."""

    @property
    def loss_mask(self) -> torch.Tensor | None:
        """bool [rows]; None if a sample has none."""
        return self.tensors.get(LOSS_MASK)


class PaddedBatch(NamedTuple):
    """Samples side by side, with zeros at the end of short ones."""

    rows: torch.Tensor
    """[samples, most rows, layers, hidden]"""
    token_ids: torch.Tensor
    """int64 [samples, most rows], ids of the tokens that the rows belong to"""
    positions: torch.Tensor
    """int64 [samples, most rows], positions of these tokens in their samples"""
    mask: torch.Tensor
    """bool [samples, most rows], true where there is a row"""
    samples: torch.Tensor
    """int64 [samples], their ``index``"""
    tensors: dict[str, torch.Tensor]
    """The other tensors that all these samples have, [samples, most rows, ...] each."""
    columns: dict[str, list[Any]]
    """The columns that were kept, one value for each sample."""

    @property
    def loss_mask(self) -> torch.Tensor | None:
        """bool [samples, most rows], false where there is no row; None if a sample has none."""
        return self.tensors.get(LOSS_MASK)


def rows_of(sample: HiddenStatesSample) -> RowBatch:
    """Return the rows of one sample, with fp8 as bfloat16."""
    return RowBatch(
        sample.hidden_states if sample.scales is None else sample.rows(),
        sample.token_ids[sample.positions],
        sample.positions,
        torch.full_like(sample.positions, sample.index),
        sample.other_tensors,
        {name: [value] * len(sample.positions) for name, value in sample.columns.items()},
    )


def _rows_of_each(samples: Sequence[HiddenStatesSample]) -> list[RowBatch]:
    if not samples:
        raise ValueError("samples=[]: there is nothing to make a batch of")
    for sample in samples:
        if sample.layer_ids != samples[0].layer_ids:
            layers = f"{list(samples[0].layer_ids)} and {list(sample.layer_ids)}"
            raise ValueError(
                f"samples {samples[0].index} and {sample.index} have the layers {layers}: a batch "
                "has rows of the same layers; make one of each"
            )
    return [rows_of(sample) for sample in samples]


def part_of(batch: RowBatch, rows: slice | torch.Tensor) -> RowBatch:
    """Return the rows of a slice, or those with these numbers."""
    columns = {
        name: values[rows] if isinstance(rows, slice) else [values[row] for row in rows.tolist()]
        for name, values in batch.columns.items()
    }
    return RowBatch(
        batch.rows[rows],
        batch.token_ids[rows],
        batch.positions[rows],
        batch.samples[rows],
        {name: tensor[rows] for name, tensor in batch.tensors.items()},
        columns,
    )


def shuffled(
    batches: Iterator[RowBatch], batch_size: int, num_waiting: int, seed: int
) -> Iterator[RowBatch]:
    """Yield the rows in batches that are drawn from ``num_waiting`` rows; then half of these are
    replaced by the next ones."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[RowBatch] = []
    count = 0
    for batch in itertools.chain(batches, [None]):
        if batch is not None:
            waiting.append(batch)
            count += len(batch.rows)
        if not count or (batch is not None and count < num_waiting):
            continue
        pool, order = join(waiting), torch.randperm(count, generator=generator)
        some = max(1, count // 2 // batch_size) * batch_size
        leaving, kept = order.tensor_split([count if batch is None else some])
        for start in range(0, len(leaving), batch_size):
            yield part_of(pool, leaving[start : start + batch_size])
        waiting, count = [part_of(pool, kept)], len(kept)


def join(parts: list[RowBatch]) -> RowBatch:
    """Concatenate the parts."""
    if len(parts) == 1:
        return parts[0]
    return RowBatch(
        torch.cat([part.rows for part in parts]),
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.positions for part in parts]),
        torch.cat([part.samples for part in parts]),
        {name: torch.cat(each) for name, each in _other_tensors(parts).items()},
        {
            name: [value for part in parts for value in part.columns.get(name, _nulls(part))]
            for name in dict.fromkeys(name for part in parts for name in part.columns)
        },
    )


def _nulls(part: RowBatch) -> list[None]:
    """The values of a column that the part's sample lacks."""
    return [None] * len(part.rows)


def _other_tensors(parts: Sequence[RowBatch]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that all parts with rows have, a list with one for each part."""
    full = [part.tensors for part in parts if len(part.rows)]
    names = [name for name in full[0] if all(name in one for one in full)] if full else []
    return {name: [part.tensors.get(name, full[0][name][:0]) for part in parts] for name in names}


def pack_samples(samples: Sequence[HiddenStatesSample]) -> RowBatch:
    """Concatenate all rows; ``RowBatch.samples`` holds the sample of each.

    Raises ValueError if there is no sample, or they have different layers.
    """
    return join(_rows_of_each(samples))


def pad_samples(samples: Sequence[HiddenStatesSample]) -> PaddedBatch:
    """Pad each sample to the length of the longest. A tensor has the dtype that holds the values of
    all samples.

    Raises ValueError if there is no sample, or they have different layers.
    """
    parts = _rows_of_each(samples)
    rows, token_ids, positions, mask = (
        _padded(column)
        for column in (
            [part.rows for part in parts],
            [part.token_ids for part in parts],
            [part.positions for part in parts],
            [torch.ones(len(part.rows), dtype=torch.bool) for part in parts],
        )
    )
    return PaddedBatch(
        *(rows, token_ids, positions, mask),
        torch.tensor([sample.index for sample in samples]),
        {name: _padded(each) for name, each in _other_tensors(parts).items()},
        {
            name: [sample.columns.get(name) for sample in samples]
            for name in dict.fromkeys(name for sample in samples for name in sample.columns)
        },
    )


def _padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors side by side; pad_sequence alone would round all to the first's dtype."""
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    return pad_sequence([one.to(dtype) for one in tensors], batch_first=True)


def _refuse_to_collate(samples: Sequence[HiddenStatesSample], **_: object) -> None:
    raise TypeError(
        "samples have different lengths, so torch's default collation cannot join them: use "
        "DataLoader(..., collate_fn=pad_samples), or pack_samples, both of vllm.hidden_states"
    )


default_collate_fn_map[HiddenStatesSample] = _refuse_to_collate
