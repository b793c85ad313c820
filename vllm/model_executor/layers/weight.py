"""A weight of a layer, from a checkpoint's tensors to products and look-ups.

    tensor of a checkpoint   floats, or codes of a storage format
      -> Share               the rows of it, and their columns, that the layer gets
      -> Weight.put          pieces, in any order, lie at their rows
      -> Weight.finish       once, when all are there: the form that products read
      -> multiply, look_up   in any form
      <- replace             new values for some of the rows, while an engine runs

A parameter of a module names its weight for the module's whole life (:func:`weight_of`). Only the
weight knows what lies in the parameter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vllm.forward_context import current_adapters
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.quantization.at_load import Quantise
from vllm.model_executor.layers.weight_codes import Codes, joined_codes
from vllm.model_executor.layers.weight_share import Piece, Share, Stored
from vllm.model_executor.utils import (
    LOADABLE_DTYPES,
    ElsewhereParameter,
    WeightFormatError,
    check_shape,
    make_parameter,
    set_weight_attrs,
)
from vllm.ops.linear import (
    empty_panels,
    linear,
    make_panels,
    panel_embedding,
    prefers_panels,
    rows_into_panels,
    rows_of_panels,
)
from vllm.ops.packed_linear import PackedExperts, PackedWeight, unpacks_weights

_ATTRIBUTE = "named_weight"
"""Attribute of a parameter: the weight that it names."""


class Part(NamedTuple):
    """Rows ``start`` to ``end - 1`` of a weight that has codes."""

    start: int
    end: int
    rows: Codes | Weight


class Weight:
    """A weight [m, n], or a table [m, n] for each expert: [tables, m, n].

    It lies in one of three forms. *Rows* lie in the parameter as in a float checkpoint: while the
    weight loads, and afterwards if products read rows or something else reads the parameter.
    *Panels* (:mod:`vllm.ops.linear`) lie in the parameter, too. *Parts* are codes that stay codes,
    and weights of the floats between them; the parameter is empty.

    quantise: applied to floats as they arrive. keeps_codes: codes stay codes if products unpack
    them. stays_in_rows: something else reads the parameter.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        *,
        quantise: Quantise | None = None,
        keeps_codes: bool = False,
        stays_in_rows: bool = False,
    ) -> None:
        set_weight_attrs(parameter, {_ATTRIBUTE: self})
        self.parameter = parameter
        self.shape = tuple(parameter.shape)
        self.quantise, self.keeps_codes = quantise, keeps_codes
        self.stays_in_rows = stays_in_rows
        self.is_finished = False
        self.is_adapted = False
        """True if there was an adapter of it (:mod:`vllm.model_executor.layers.low_rank`)."""
        self.adapted_as: Weight | None = None
        """The weight that adapters know instead: the table to which this head was tied."""
        self.fixed_because: str | None = None
        """The reason why it cannot be replaced; None: it can."""
        self.is_rehearsing = False
        """True while :meth:`replace` checks pieces and writes nothing (:func:`rehearsal`)."""
        self._arrives_in_panels = False
        self._panels: torch.Tensor | None = None  # while it loads
        self._codes: defaultdict[int, dict[int, PackedWeight]] = defaultdict(dict)  # likewise
        self._parts: tuple[tuple[Part, ...], ...] | None = None

    # ---- it loads

    def begin(self) -> None:
        """Announce that all values come through :meth:`put`: floats that end as panels become
        panels at once, so each value is read once and written once.

        Meanwhile the parameter has no memory and reads as NaN.
        """
        if self._ends_in_panels:
            nothing = self.parameter.data.new_full((), torch.nan)
            self.parameter.data = nothing.expand(self.shape)
            self._arrives_in_panels = True

    def keeps(self, stored: PackedWeight | PackedExperts) -> bool:
        """Tell whether codes stay codes; otherwise they are dequantised."""
        return self.keeps_codes and self._unpacks(stored)

    def _unpacks(self, stored: PackedWeight | PackedExperts) -> bool:
        return unpacks_weights(self.parameter.device) and stored.can_be_panels()

    def as_kept(self, stored: Stored) -> Stored:
        """Dequantise codes that do not stay codes, and quantise floats if the weight does."""
        if isinstance(stored, PackedWeight):
            codes, is_kept = stored, self.keeps(stored)
        elif self.quantise is not None:
            codes = self.quantise(stored)
            is_kept = self._unpacks(codes)
        else:
            return stored
        return codes if is_kept else codes.dequantise(self.parameter.dtype)

    def load(self, arrivals: Iterable[tuple[Stored, Share]]) -> None:
        """Take shares of a checkpoint's tensors: :meth:`put` them, or :meth:`replace` the rows of
        a finished weight."""
        pieces = (piece for arrival in arrivals for piece in self._pieces(*arrival))
        if self.is_finished:
            self.replace(pieces)
        else:
            for piece in pieces:
                self.put(*piece)

    def _pieces(self, stored: Stored, share: Share) -> Iterator[Piece]:
        share.check(stored)
        return share.pieces(self.as_kept(stored))

    def put(self, stored: Stored, row: int = 0, table: int = 0) -> None:
        """Keep ``stored`` [k, n] from ``row`` on."""
        assert not self.is_finished, "only replace() changes a finished weight"
        if isinstance(stored, PackedWeight):
            self._codes[table][row] = stored
            return
        if self._arrives_in_panels and self._panels is None:
            self._panels = empty_panels(self.parameter)
        self._write(stored, row, table)

    def finish(self) -> None:
        """Take the form that products read, now that all values are there, and free the rest."""
        assert not self.is_finished
        parameter = self.parameter
        if self._codes:
            tables = range(self.shape[0] if len(self.shape) == 3 else 1)
            self._parts = tuple(tuple(self._make_parts(table)) for table in tables)
            parameter.data = parameter.data.new_empty((0, *self.shape[1:]))
        elif self._panels is not None:
            parameter.data = self._panels
        elif self._ends_in_panels:
            parameter.data = make_panels(parameter.data)
        self._panels, self.is_finished = None, True

    def quantise_rows(self, quantise: Quantise) -> None:
        """Quantise the floats that are there, in rows, and those that come."""
        self.quantise = quantise
        self.put(self.as_kept(self.parameter.data))

    # ---- it serves

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ rows.T + bias``: [tokens, n] -> [tokens, m]."""
        out = x.new_empty((x.shape[0], self.shape[-2]))
        self.multiply_into(x, bias, out)
        return out

    def multiply_into(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, table: int = 0
    ) -> None:
        """Write the same product, with one of the tables, to ``out`` [tokens, m], strided."""
        if self._parts is None:
            linear(x, self._floats(table), bias, out)
        else:
            for start, end, rows in self._parts[table]:
                if end - start == self.shape[-2]:
                    rows.multiply_into(x, bias, out)
                else:
                    added = None if bias is None else bias[start:end]
                    rows.multiply_into(x, added, out[:, start:end])
        if self.is_adapted:
            self.adapt(x, out, table)

    def adapt(self, x: torch.Tensor, out: torch.Tensor, table: int = 0) -> None:
        """Add what adapters change in that product."""
        if (adapters := current_adapters()) is not None:
            adapters.add(self.adapted_as or self, table, x, out)

    def look_up(self, rows: torch.Tensor, table: int = 0) -> torch.Tensor:
        """Return rows ``rows``, int64 [k], as floats: a new tensor [k, n]."""
        num_rows, terms = self.shape[-2:]
        found = self.parameter.new_empty((len(rows), terms))
        if self._parts is None:
            floats = self._floats(table)
            if floats.dim() == 2:
                return functional.embedding(rows, floats)
            panel_embedding(rows.contiguous(), floats, num_rows, found)
            return found
        for start, end, part in self._parts[table]:
            if end - start == num_rows:
                return part.look_up(rows)
            here = (rows >= start) & (rows < end)
            found[here] = part.look_up(rows[here] - start)
        return found

    @property
    def is_in_rows(self) -> bool:
        """True if the parameter holds all rows as in a float checkpoint."""
        return self._parts is None and self.parameter.dim() == len(self.shape)

    @property
    def has_codes(self) -> bool:
        """True if some of the rows are codes."""
        return bool(self._codes) or self._parts is not None

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        parts = (part for table in self._parts or () for part in table)
        return self.parameter.nbytes + sum(part.rows.num_bytes for part in parts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that hold it."""
        parts = (part.rows.tensors for table in self._parts or () for part in table)
        return [self.parameter.data, *itertools.chain.from_iterable(parts)]

    # ---- it changes

    def replace(self, pieces: Iterable[Piece]) -> None:
        """Overwrite rows, in the memory that they have, as if these had been loaded.

        WeightShapeError, WeightFormatError: a piece does not fit there. ValueError: the weight is
        fixed. Then nothing has changed.
        """
        assert self.is_finished
        if self.fixed_because is not None:
            raise ValueError(f"weights cannot be replaced: {self.fixed_because}; make a new engine")
        writes = [write for piece in pieces for write in self.writes(*piece)]
        for write in () if self.is_rehearsing else writes:
            write()

    def writes(self, stored: Stored, row: int, table: int = 0) -> Iterator[Callable[[], None]]:
        """Yield the steps of :meth:`replace` for one piece."""
        num_rows, terms = self.shape[-2:]
        check_shape(stored, (min(stored.shape[0], num_rows - row), terms))
        if self._parts is None:
            if isinstance(stored, PackedWeight):
                raise WeightFormatError(stored.description, f"{self.parameter.dtype}")
            if stored.dtype not in LOADABLE_DTYPES:
                raise WeightFormatError(f"{stored.dtype}", f"{self.parameter.dtype}")
            yield partial(self._write, stored, row, table)
            return
        for start, end, part in self._parts[table]:
            first, last = max(row, start), min(row + stored.shape[0], end)
            if first < last:
                yield from part.writes(stored.narrow(0, first - row, last - first), first - start)

    # ---- the floats

    @property
    def _ends_in_panels(self) -> bool:
        return not self.stays_in_rows and prefers_panels(self.parameter.device)

    def _floats(self, table: int) -> torch.Tensor:
        """Rows of that table, or their panels."""
        floats = self.parameter if self._panels is None else self._panels
        return floats if len(self.shape) == 2 else floats[table]

    def _write(self, rows: torch.Tensor, first: int, table: int) -> None:
        floats = self._floats(table).data
        if floats.dim() == 2:
            floats[first : first + len(rows)].copy_(rows)
        else:
            rows_into_panels(floats, first, rows, self.shape[-2])

    def _make_parts(self, table: int) -> Iterator[Part]:
        end, num_rows = 0, self.shape[-2]
        for start, codes in joined_codes(self._codes.pop(table, {})).items():
            if start > end:
                yield Part(end, start, self._float_part(table, end, start))
            end = start + codes.shape[0]
            yield Part(start, end, Codes(codes, self.parameter.dtype))
        if end < num_rows:
            yield Part(end, num_rows, self._float_part(table, end, num_rows))

    def _float_part(self, table: int, first: int, end: int) -> Weight:
        floats = self._floats(table)
        if floats.dim() == 2:
            rows = floats[first:end].clone()
        else:
            rows = rows_of_panels(floats, first, end, self.shape[-1])
        weight = Weight(make_parameter(rows), stays_in_rows=self.stays_in_rows)
        weight.finish()
        return weight


def weight_of(parameter: nn.Parameter) -> Weight:
    """The weight that a parameter names; if there is none yet, one of floats in rows."""
    weight = find_weight(parameter)
    return Weight(parameter) if weight is None else weight


def find_weight(parameter: torch.Tensor) -> Weight | None:
    """The weight that a parameter names; None: the parameter is nothing else."""
    weight: Weight | None = parameter.__dict__.get(_ATTRIBUTE)
    return weight


def weights_of(model: nn.Module) -> dict[Weight, list[nn.Module]]:
    """All weights of a model, each with the modules that hold its parameter."""
    found: defaultdict[Weight, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            weight = find_weight(parameter)
            if weight is not None:
                found[weight].append(module)
    return found


def begin_weights(model: nn.Module) -> None:
    """Announce that weight loaders bring all values, and that nothing reads a parameter before."""
    for weight in _with_known_readers(model):
        weight.begin()


def finish_weights(model: nn.Module) -> None:
    """Finish every weight of a model; one that a foreign module holds too stays in rows."""
    for weight in _with_known_readers(model):
        weight.finish()


def _with_known_readers(model: nn.Module) -> Iterator[Weight]:
    for weight, holders in weights_of(model).items():
        weight.stays_in_rows |= not all(isinstance(module, Layer) for module in holders)
        yield weight


def weight_storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """Return the memory of a model's parameters and weights, each once."""
    parameters = model.parameters()
    tensors = [one.data for one in parameters if not isinstance(one, ElsewhereParameter)]
    for weight in weights_of(model):
        tensors += weight.tensors
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.numel())
    return list({storage.data_ptr(): storage for storage in storages}.values())


def fix_weights(model: nn.Module, reason: str) -> None:
    """Refuse replacements of a model's weights from now on, for this reason."""
    for weight in weights_of(model):
        weight.fixed_because = reason


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[None]:
    """Let the loaders of a finished model check what they are given, and change nothing."""
    weights = weights_of(model)
    small = [
        parameter
        for parameter in model.parameters()
        if find_weight(parameter) is None and not isinstance(parameter, ElsewhereParameter)
    ]
    kept = [parameter.data for parameter in small]
    try:
        for parameter in small:  # their loaders write into the parameter
            parameter.data = torch.empty_like(parameter.data)
        for weight in weights:
            weight.is_rehearsing = True
        yield
    finally:
        for parameter, values in zip(small, kept, strict=True):
            parameter.data = values
        for weight in weights:
            weight.is_rehearsing = False


def num_weight_bytes(model: nn.Module) -> int:
    """Memory that the parameters and weights of a model take."""
    parameters = [
        parameter
        for parameter in model.parameters()
        if not isinstance(parameter, ElsewhereParameter)
    ]
    weights = [(parameter, find_weight(parameter)) for parameter in parameters]
    return sum(p.nbytes if weight is None else weight.num_bytes for p, weight in weights)
