"""Fields that are kept of a token, and their places in the bytes of a row.

    row | hidden states [layers, hidden] | field [columns, width] | next field | ...

A *field* declares one thing that is kept: its form in memory, how it is made from a model's values,
its names in files, and the check of its values. A *layout* places the fields of an engine one after
another, so that a row is one run of bytes. On the host each tensor of a field is dense, as in
files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch

from vllm.exceptions import Failure
from vllm.forward_context import HIDDEN_STATES
from vllm.utils.boundaries import LayerId, in_order
from vllm.utils.math_utils import round_up

ALL_FIELDS = frozenset({"*"})
"""``keeps`` of a connector or destination that takes any field."""
_ALIGNMENT_BYTES = 8


class Cells(NamedTuple):
    """The form of a field in a row: [columns, width] elements."""

    dtype: torch.dtype
    columns: int
    width: int

    @property
    def num_bytes(self) -> int:
        return self.columns * self.width * self.dtype.itemsize


class TensorForm(NamedTuple):
    """A tensor on the host: its dtype, and the shape of one token's part."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FieldFacts:
    """Facts from which a field is made once the model is loaded."""

    num_hidden_layers: int
    row_size: int
    """Elements of a token's stream at a boundary."""
    dtype: torch.dtype
    """Dtype of the model."""
    captured: Any = None
    """Facts about the model from the capture of the source (``model_executor/captures.py``)."""


class Field(ABC):
    """One thing that is kept of each token besides its hidden states.

    A field is a frozen dataclass: equal fields have the same form.
    """

    name: ClassVar[str]
    """Name in errors and in ``keeps`` of connectors."""
    source: ClassVar[str] = HIDDEN_STATES
    """Name under which ``RowSink.put`` gets the values of which it is made."""
    tensor_names: ClassVar[tuple[str, ...]]
    """Tensors in files, with a row for each token."""
    constant_names: ClassVar[tuple[str, ...]] = ()
    """Tensors of integers that are the same for all tokens."""

    @classmethod
    def make(cls, facts: FieldFacts) -> Self:
        """Make the field for a model. A class that ``row_fields`` names overrides it."""
        raise NotImplementedError(f"{cls.__name__}: no engine keeps it of every token")

    @classmethod
    def deepest_layer(cls, num_hidden_layers: int) -> int:
        """Number of decoder layers that have to run for it, even if nothing else needs them."""
        return 0

    @property
    @abstractmethod
    def cells(self) -> Cells:
        """The form of the field in a row."""

    @property
    def boundaries(self) -> frozenset[LayerId]:
        """Boundaries at which the model has to hand over its stream."""
        return frozenset()

    @property
    def indexes(self) -> Sequence[LayerId]:
        """Indexes to put for every token: layer ids for hidden states, otherwise numbers."""
        if self.source == HIDDEN_STATES:
            return in_order(self.boundaries)
        return range(self.cells.columns)

    def columns_of(self, index: LayerId) -> Sequence[int]:
        """Return the columns that take what is put under ``index``; empty: none does."""
        if self.source == HIDDEN_STATES:
            return (self.indexes.index(index),) if index in self.boundaries else ()
        assert isinstance(index, int)
        return (index,)

    @abstractmethod
    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode values of some tokens for storage: [tokens, width] of the cells' dtype, and
        another such tensor to be added to it (None: nothing)."""

    @property
    @abstractmethod
    def forms(self) -> Mapping[str, TensorForm]:
        """Forms of the field's tensors on the host, by name."""

    @abstractmethod
    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert cells [tokens, columns, width] on the host to its tensors [tokens, ...].

        Cells that were never written are all zero, or all ones in memory of the pool.
        """

    @abstractmethod
    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        """Find a token whose values cannot be right, if that can be seen; None: there is none."""

    @property
    def constants(self) -> Mapping[str, Sequence[int]]:
        """Tensors that are the same for all tokens, by ``constant_names``."""
        return {}

    def not_put(self, indexes: Sequence[LayerId], num_told: int, num_tokens: int) -> str:
        """Return the error text if these indexes were not put for all tokens."""
        return (
            f"field {self.name!r}: the model handed over values of {list(indexes)} for {num_told} "
            f"of {num_tokens} tokens"
        )


@dataclass(frozen=True)
class RowLayout:
    """The places of an engine's fields in a row: hidden states, then the others."""

    first: Cells
    """Hidden states, [layers, hidden]."""
    others: tuple[Field, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte in a row at which each of the others begins, and the end of the row."""
        offsets, end = [], self.first.num_bytes
        for field in self.others:
            offsets.append(round_up(end, _ALIGNMENT_BYTES))
            end = offsets[-1] + field.cells.num_bytes
        return (*offsets, round_up(end, _ALIGNMENT_BYTES) if self.others else end)

    @property
    def row_bytes(self) -> int:
        return self.offsets[-1]

    @property
    def rest_bytes(self) -> int:
        """Bytes of a row from the first of the others to its end."""
        return self.offsets[-1] - self.offsets[0]

    def allocate(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Allocate rows [1, num_rows, layers, hidden], uninitialised, each followed by the other
        fields, which are zero."""
        shape = (1, num_rows, self.first.columns, self.first.width)
        if not self.others:
            return torch.empty(shape, dtype=self.first.dtype, device=device)
        memory = torch.zeros(num_rows * self.row_bytes, dtype=torch.int8, device=device)
        rows = memory.view(self.first.dtype)
        width, row = self.first.width, self.row_bytes // self.first.dtype.itemsize
        return rows.as_strided(shape, (num_rows * row, row, width, 1))

    def rest_of(self, rows: torch.Tensor) -> torch.Tensor:
        """int8 [blocks, rows, rest_bytes] after hidden states [blocks, rows, layers, hidden]."""
        as_bytes = rows.view(torch.int8)
        begin = as_bytes.storage_offset() + self.offsets[0]
        shape = (*rows.shape[:2], self.rest_bytes)
        return as_bytes.as_strided(shape, (*as_bytes.stride()[:2], 1), begin)

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Views of each of the others, [blocks, rows, columns, width], after hidden states."""
        return self._split(self.rest_of(rows)) if self.others else []

    def decode(self, rest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert int8 [tokens, rest_bytes] on the host to the tensors of the others."""
        tensors: dict[str, torch.Tensor] = {}
        for field, cells in zip(self.others, self._split(rest), strict=True):
            tensors |= field.decode(cells)
        return tensors

    def _split(self, rest: torch.Tensor) -> list[torch.Tensor]:
        """Split [..., rest_bytes] into [..., columns, width] of each of the others."""
        parts = []
        for field, offset in zip(self.others, self.offsets, strict=False):
            dtype, columns, width = field.cells
            start = offset - self.offsets[0]
            part = rest[..., start : start + field.cells.num_bytes]
            parts.append(part.view(dtype).view(*rest.shape[:-1], columns, width))
        return parts

    @property
    def forms(self) -> dict[str, TensorForm]:
        """Forms of the others' tensors on the host, by name."""
        return {name: form for field in self.others for name, form in field.forms.items()}

    @property
    def constants(self) -> dict[str, list[int]]:
        return {name: [*v] for field in self.others for name, v in field.constants.items()}

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        """Find a fault in the others' tensors of the tokens at ``positions``."""
        faults = (field.find_fault(tensors, positions) for field in self.others)
        return next((fault for fault in faults if fault is not None), None)
