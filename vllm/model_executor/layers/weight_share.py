"""The rows of a checkpoint's tensor that a layer gets, in runs, and the columns of these rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm.model_executor.utils import check_shape
from vllm.ops.packed_linear import PackedWeight

Stored = torch.Tensor | PackedWeight
"""Rows as a checkpoint has them: floats [k, n], or codes of a storage format."""


class Run(NamedTuple):
    """Consecutive rows."""

    source: int
    """The first row in the checkpoint's tensor."""
    length: int
    target: int
    """The first row in the layer's weight."""


class Piece(NamedTuple):
    """Rows for a weight."""

    stored: Stored
    row: int = 0
    """The place of the first one."""
    table: int = 0
    """The table of the weight, which is an expert's number."""


@dataclass(frozen=True)
class Share:
    """The part of one tensor of a checkpoint that a layer gets."""

    shape: tuple[int, int]
    """Shape of the whole tensor; a bias has only the first entry."""
    runs: tuple[Run, ...]
    columns: tuple[int, int] | None = None
    """The first column and their number; None: all."""
    table: int = 0

    @staticmethod
    def of_all(rows: int, columns: int) -> Share:
        """Make the share of a whole tensor."""
        return Share((rows, columns), (Run(0, rows, 0),))

    def check(self, stored: Stored) -> None:
        """WeightShapeError: the tensor has another shape."""
        check_shape(stored, self.shape)

    def pieces(self, stored: Stored) -> Iterator[Piece]:
        """Cut the tensor. CutGroupError: the columns do not hold whole groups of codes."""
        for run in self.runs:
            piece: Stored = stored.narrow(0, run.source, run.length)
            if self.columns is not None:
                piece = piece.narrow(1, *self.columns)
            yield Piece(piece, run.target, self.table)

    def copy_entries(self, loaded: torch.Tensor, entries: torch.Tensor) -> None:
        """Copy the share of a bias, or of another tensor with one entry per row, to ``entries``."""
        check_shape(loaded, (self.shape[0], *entries.shape[1:]))
        for run in self.runs:
            part = loaded.narrow(0, run.source, run.length)
            entries[run.target : run.target + run.length].copy_(part)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join runs that follow one another both in the tensor and in the weight."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else Run(-1, 0, -1)
        if (run.source - last.source, run.target - last.target) == (last.length, last.length):
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    return tuple(found)


@dataclass(frozen=True)
class HeadSlice:
    """A rank's heads."""

    count: int
    first: int
    total: int
    """Heads of all ranks."""

    def load(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Keep these heads' entries of a tensor with equally many for each: a weight loader."""
        entries = len(param) // self.count
        check_shape(loaded_weight, (self.total * entries, *param.shape[1:]))
        param.data.copy_(loaded_weight.narrow(0, self.first * entries, len(param)))
