"""Destinations of the rows of one request: a small interface, and the tensors of a caller."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from vllm.exceptions import Failure, FailureKind
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import ALL_FIELDS, RowLayout
from vllm.v1.rows.leaving import BadRowsError, Ints, empty_rows

_LARGEST_PIECE_ROWS = 256


class RowDestination(Protocol):
    """Takes the rows of one request in their order, from one thread at a time.

    :class:`vllm.v1.rows.file.HiddenStatesFile` is one.
    """

    def append(self, rows: Any) -> None:
        """Take the next rows, which were checked. A destination that :class:`KeepsFields` gets
        :class:`vllm.v1.outputs.ExtractedRows` with all fields, others only the hidden states, a
        tensor [rows, layers, hidden]. The memory of the rows is used again afterwards."""
        ...

    def finish(self, token_ids: list[int]) -> None:
        """Hand over the complete rows. ValueError: there is not one row for each token."""
        ...

    def discard(self) -> None:
        """Leave nothing behind."""
        ...


@runtime_checkable
class KeepsFields(Protocol):
    """A destination that takes more than hidden states."""

    keeps: frozenset[str]
    """Names of the other fields, or ``ALL_FIELDS``."""


def append_rows(destination: RowDestination, rows: ExtractedRows, layout: RowLayout) -> None:
    """Hand over rows in the form that the destination takes.

    ValueError: they have a field that it does not keep.
    """
    keeps = destination.keeps if isinstance(destination, KeepsFields) else None
    for field in layout.others:
        if not ({field.name, *ALL_FIELDS} & (keeps or frozenset())):
            raise ValueError(
                f"{type(destination).__name__} does not keep the field {field.name!r}: give it "
                "keeps, and take ExtractedRows in append, or leave the field out"
            )
    destination.append(rows.hidden_states if keeps is None else rows)


class CallerTensors:
    """The rows of one request as separate tensors, filled step by step.

    positions: tokens whose rows are wanted, ascending.
    """

    keeps = ALL_FIELDS
    grows: ClassVar[bool] = False
    """True if the rows are complete only when the request has ended."""

    def __init__(
        self, hidden: HiddenStates, layout: RowLayout, positions: Sequence[int] | Ints
    ) -> None:
        self.hidden = hidden
        self.layout = layout
        self.positions = np.array(positions, dtype=np.int64)
        """int64 [rows], ascending."""
        self._rows = self._make_room(len(self.positions))
        self.num_sent = 0
        """Rows that have arrived or are on their way."""
        self.num_arrived = 0
        """Rows that have been appended."""

    def _make_room(self, num_rows: int) -> ExtractedRows:
        with torch.inference_mode(False):  # the caller may want gradients
            forms = self.hidden.forms | self.layout.forms
            return ExtractedRows(empty_rows(forms, num_rows), self.layout.constants)

    def positions_before(self, end: int) -> Ints:
        """Return :attr:`positions`, all of those below ``end`` included."""
        return self.positions

    def _place(self, first: int, count: int) -> ExtractedRows:
        """The places of rows ``first .. first + count - 1``."""
        return self._rows.part(slice(first, first + count))

    def room(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The places of the hidden states of rows ``first .. first + count - 1``. Values that are
        there already when the rows are appended are not copied."""
        tensors = self._place(first, count).tensors
        return {name: tensors[name] for name in self.hidden.forms}

    def append(self, rows: ExtractedRows) -> None:
        targets = self._place(self.num_arrived, len(rows)).tensors
        self.num_arrived += len(rows)
        for name, tensor in rows.tensors.items():
            if tensor.data_ptr() != targets[name].data_ptr():
                targets[name].copy_(tensor)

    def fresh(self) -> CallerTensors:
        """Return new tensors for the same rows, none of which has arrived."""
        return CallerTensors(self.hidden, self.layout, self.positions)

    def finish(self, token_ids: list[int]) -> None:
        """Do nothing: the caller asks for :meth:`whole`."""

    def discard(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def whole(self) -> ExtractedRows:
        """Return all rows. BadRowsError: one of them never came."""
        missing = self.positions[self.num_arrived :]
        if len(missing):
            message = (
                f"hidden states of {len(missing)} tokens were not computed, the first of them "
                f"token {missing[0]}"
            )
            raise BadRowsError(Failure(FailureKind.STEP_FAILED, message))
        return self._rows


class PassingTensors(CallerTensors):
    """The rows of a request whose caller gets those of each step at once."""

    def __init__(
        self, hidden: HiddenStates, layout: RowLayout, positions: Sequence[int] | Ints
    ) -> None:
        super().__init__(hidden, layout, ())
        self.positions = np.array(positions, dtype=np.int64)
        self._pieces: dict[int, ExtractedRows] = {}
        """Rows on their way, by the number of the first."""

    def _place(self, first: int, count: int) -> ExtractedRows:
        if first not in self._pieces:
            room = self._make_room(count)
            self._pieces[first] = ExtractedRows(room.tensors, room.constants, first)
        return self._pieces[first]

    def take(self, first: int) -> ExtractedRows:
        """Return the piece that begins with this row, which has arrived, and forget it."""
        return self._pieces.pop(first)

    def fresh(self) -> CallerTensors:
        return PassingTensors(self.hidden, self.layout, self.positions)

    def whole(self) -> ExtractedRows:
        """Return no rows: all were taken. BadRowsError: one of them never came."""
        end = super().whole()
        return ExtractedRows(end.tensors, end.constants, len(self.positions))


class GrowingTensors(CallerTensors):
    """The rows of a request that generates: their number is known only when it has ended.

    find_positions: maps (rank, end) to the wanted positions below ``end`` from that rank on.
    """

    grows = True

    def __init__(
        self, hidden: HiddenStates, layout: RowLayout, find_positions: Callable[[int, int], Ints]
    ) -> None:
        super().__init__(hidden, layout, ())
        self._find_positions = find_positions
        self._pieces: list[ExtractedRows] = []
        self._starts: list[int] = []
        """Rows before each piece."""

    def positions_before(self, end: int) -> Ints:
        new = self._find_positions(len(self.positions), end)
        if len(new):
            self.positions = np.concatenate((self.positions, new))
        return self.positions

    def _place(self, first: int, count: int) -> ExtractedRows:
        """Rows of one step lie in one piece; a piece that is full is followed by a larger one."""
        index = bisect.bisect_right(self._starts, first) - 1
        if index < 0 or first + count > self._starts[index] + len(self._pieces[index]):
            if index >= 0:
                self._pieces[index] = self._pieces[index].part(slice(first - self._starts[index]))
            self._pieces.append(self._make_room(max(count, min(first, _LARGEST_PIECE_ROWS))))
            self._starts.append(first)
            index += 1
        start = first - self._starts[index]
        return self._pieces[index].part(slice(start, start + count))

    def fresh(self) -> CallerTensors:
        return GrowingTensors(self.hidden, self.layout, self._find_positions)

    def whole(self) -> ExtractedRows:
        """Return the rows that have arrived. BadRowsError: there is no memory for them."""
        if not self._pieces:
            return self._rows
        pieces, self._pieces = self._pieces, []
        pieces[-1] = pieces[-1].part(slice(self.num_arrived - self._starts[-1]))
        try:
            with torch.inference_mode(False):
                tensors = {
                    name: torch.cat([piece.tensors[name] for piece in pieces])
                    for name in pieces[0].tensors
                }
        except (RuntimeError, MemoryError) as error:
            failure = Failure(FailureKind.OUT_OF_MEMORY, f"{self.num_arrived} rows: {error}")
            raise BadRowsError(failure) from error
        return ExtractedRows(tensors, self.layout.constants)
