"""Destinations of the rows of one request: a small interface, and the tensors of a caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from vllm.exceptions import Failure, FailureKind
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import ALL_FIELDS, RowLayout
from vllm.v1.rows.leaving import BadRowsError, Ints, empty_rows


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

    num_tokens: tokens of the prompt; positions: tokens whose rows are wanted, ascending.
    """

    keeps = ALL_FIELDS

    def __init__(
        self, hidden: HiddenStates, layout: RowLayout, positions: Sequence[int] | Ints
    ) -> None:
        self.hidden = hidden
        self.layout = layout
        self.positions = np.array(positions, dtype=np.int64)
        """int64 [rows], ascending."""
        with torch.inference_mode(False):  # the caller may want gradients
            forms = hidden.forms | layout.forms
            self._rows = ExtractedRows(empty_rows(forms, len(self.positions)), layout.constants)
        self.num_sent = 0
        """Rows that have arrived or are on their way."""
        self._num_arrived = 0

    def room(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The places of the hidden states of rows ``first .. first + count - 1``. Values that are
        there already when the rows are appended are not copied."""
        tensors = self._rows.part(slice(first, first + count)).tensors
        return {name: tensors[name] for name in self.hidden.forms}

    def append(self, rows: ExtractedRows) -> None:
        start = self._num_arrived
        self._num_arrived = start + len(rows)
        targets = self._rows.part(slice(start, self._num_arrived)).tensors
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
        missing = self.positions[self._num_arrived :]
        if len(missing):
            message = (
                f"hidden states of {len(missing)} tokens were not computed, the first of them "
                f"token {missing[0]}"
            )
            raise BadRowsError(Failure(FailureKind.STEP_FAILED, message))
        return self._rows
