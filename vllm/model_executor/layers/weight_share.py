"""The part of a checkpoint's tensor that a layer gets: rows, in runs, and some of their columns."""

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
    """The first one in the checkpoint's tensor."""
    length: int
    target: int
    """Where it lies in the layer's weight."""


class Piece(NamedTuple):
    """Rows for a weight."""

    stored: Stored
    row: int = 0
    """Where the first one lies."""
    table: int = 0
    """Which of the weight's tables has them: an expert's number."""


@dataclass(frozen=True)
class Share:
    """What a layer gets of one tensor of a checkpoint."""

    shape: tuple[int, int]
    """The whole tensor's. A bias has its first entry alone."""
    runs: tuple[Run, ...]
    columns: tuple[int, int] | None = None
    """The first one and their number; None: all."""
    table: int = 0

    @staticmethod
    def of_all(rows: int, columns: int, table: int = 0) -> Share:
        """The whole tensor."""
        return Share((rows, columns), (Run(0, rows, 0),), table=table)

    def check(self, stored: Stored) -> None:
        """WeightShapeError: it is not of that shape."""
        check_shape(stored, self.shape)

    def pieces(self, stored: Stored) -> Iterator[Piece]:
        """CutGroupError: the columns do not hold whole groups of codes."""
        for run in self.runs:
            piece: Stored = stored.narrow(0, run.source, run.length)
            if self.columns is not None:
                piece = piece.narrow(1, *self.columns)
            yield Piece(piece, run.target, self.table)

    def copy_entries(self, loaded: torch.Tensor, entries: torch.Tensor) -> None:
        """The same of a bias, or of whatever has something for each row: into ``entries``."""
        check_shape(loaded, (self.shape[0], *entries.shape[1:]))
        for run in self.runs:
            part = loaded.narrow(0, run.source, run.length)
            entries[run.target : run.target + run.length].copy_(part)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that go on where the one before them ends, in the tensor and in the weight, are one."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and run == (
            last.source + last.length,
            run.length,
            last.target + last.length,
        ):
            found[-1] = last._replace(length=last.length + run.length)
        else:
            found.append(run)
    return tuple(found)
