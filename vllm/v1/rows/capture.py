"""The sink that takes fields of rows from a model, in any way in which it hands them over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm.forward_context import HIDDEN_STATES, only_rows
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.rows import capture_rows
from vllm.utils.boundaries import NORM, LayerId, in_order
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import Field, RowLayout
from vllm.v1.rows.fields.logprobs import LOGITS, LogprobField

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


class CaptureTarget(NamedTuple):
    """The destination of the rows of one step's tokens."""

    row_cache: torch.Tensor
    """Hidden states, strided view [blocks, rows_per_block, layers, hidden]; the other fields follow
    them in each row as ``layout`` says."""
    slots: torch.Tensor
    """int64 [tokens], ``block * rows_per_block + row``; -1: the token's row is not wanted."""
    hidden: HiddenStates
    layout: RowLayout
    next_token_ids: torch.Tensor | None = None
    """int64 [tokens], the token that follows each, -1 if it is not known; for log-probabilities."""


class _Taker(NamedTuple):
    """A field in the memory of a target."""

    field: Field
    cells: torch.Tensor
    """[blocks, rows_per_block, columns, width]"""
    slots: torch.Tensor
    next_token_ids: torch.Tensor | None


class RowCapture:
    """The ``RowSink`` of one forward pass, which notices values that were not handed over.

    Models that use the shared decoder loop hand the stream over as it passes; models that collect
    auxiliary hidden states themselves (``SupportsEagle3``) hand all of them over at the end
    (:meth:`take_aux_hidden_states`).
    """

    def __init__(self, targets: Sequence[CaptureTarget]) -> None:
        self._takers: dict[str, list[_Taker]] = defaultdict(list)
        for row_cache, slots, hidden, layout, next_token_ids in targets:
            memory = (row_cache, *layout.views(row_cache))
            for field, cells in zip((hidden, *layout.others), memory, strict=True):
                self._takers[field.source].append(_Taker(field, cells, slots, next_token_ids))
        takers = [taker for takers in self._takers.values() for taker in takers]
        self.layer_ids = frozenset[LayerId]().union(*(taker.field.boundaries for taker in takers))
        self._num_put: Counter[tuple[str, LayerId]] = Counter()
        """Tokens whose values were put, by source and index."""

    def wants(self, source: str) -> bool:
        return source in self._takers

    def indexes_of(self, source: str) -> frozenset[LayerId]:
        takers = self._takers.get(source, ())
        return frozenset(index for taker in takers for index in taker.field.indexes)

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        start = self._num_put[source, index]
        end = self._num_put[source, index] = start + len(values[0])
        for field, cells, slots, _ in self._takers[source]:
            columns = field.columns_of(index)
            if not columns:
                continue
            own = slots if len(slots) == end - start else slots[start:end]
            stream, residual = field.encode(*values)
            # Kernels add, and may round; other dtypes are copied by the operation's body.
            store = capture_rows if cells.dtype in KERNEL_DTYPES else capture_rows.body
            for column in columns:
                store(stream, residual, own, column, cells)

    def take_logits(
        self,
        hidden: torch.Tensor,
        compute_logits: ComputeLogits,
        sampled: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Store what is kept of the logits of the tokens whose rows are wanted, a block of rows
        after another. hidden: [tokens, hidden], what the model returned.

        All targets share the products: ranks of one model have to call them alike, and those that
        keep no hidden states have other targets for the same tokens.
        """
        takers = self._takers.get(LOGITS, ())
        if not takers:
            return
        wanted = torch.stack([taker.slots >= 0 for taker in takers]).any(0).nonzero().flatten()
        at_once = min(_rows_at_once(taker.field, hidden) for taker in takers)
        after = None if sampled is None else sampled()
        for start in range(0, len(wanted), at_once):
            part = wanted[start : start + at_once]
            with only_rows(part):
                logits = compute_logits(hidden[part])
            for field, cells, slots, next_token_ids in takers:
                assert next_token_ids is not None
                if after is not None:
                    next_token_ids = torch.where(next_token_ids < 0, after, next_token_ids)
                own = (slots[part] >= 0).nonzero().flatten()
                if not len(own):
                    continue
                tokens = part[own]
                rows = logits if len(own) == len(part) else logits[own]  # not copied for nothing
                values, _ = field.encode(rows, next_token_ids[tokens])
                capture_rows.body(values, None, slots[tokens], 0, cells)

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a ``SupportsEagle3`` model collected, one tensor per layer id, ascending.

        They may have any dtype that the model computes in; rows have the engine's.
        """
        ascending = in_order(self.layer_ids - {NORM})
        if len(aux_hidden_states) != len(ascending):
            raise RuntimeError(
                f"the model returned {len(aux_hidden_states)} auxiliary hidden states for the "
                f"layer ids {ascending}: its set_aux_hidden_state_layers is not honoured"
            )
        for layer_id, hidden in zip(ascending, aux_hidden_states, strict=True):
            self.put(HIDDEN_STATES, layer_id, hidden, None)

    def end_step(self) -> None:
        """RuntimeError unless every value was put: a row that was not written is never served.
        Logits are taken later, when tokens were sampled."""
        for source, takers in self._takers.items():
            for field, _, slots, _ in takers if source != LOGITS else ():
                counts = {index: self._num_put[source, index] for index in field.indexes}
                missing = [index for index, count in counts.items() if count != len(slots)]
                if missing:
                    raise RuntimeError(field.not_put(missing, counts[missing[0]], len(slots)))


def _rows_at_once(field: Field, hidden: torch.Tensor) -> int:
    """Return how many rows of logits may exist at once for a field."""
    assert isinstance(field, LogprobField)
    return field.rows_at_once(hidden.element_size())
