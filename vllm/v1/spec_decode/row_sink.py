"""What takes the residual stream from a model, whichever way the model hands it over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class CheckedRowSink(ABC):
    """A forward pass's ``RowSink`` that notices when a boundary was not handed over.

    Models that use the shared decoder loop hand the stream over as it passes
    (:meth:`capture`); models that collect auxiliary hidden states themselves
    (``SupportsEagle3``) hand all of them over at the end (:meth:`take_aux_hidden_states`).
    """

    def __init__(self, layer_ids: frozenset[int]) -> None:
        self.layer_ids = layer_ids
        self._captured: set[int] = set()

    @abstractmethod
    def _store(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Keep the stream ``hidden (+ residual)``, [tokens, hidden]."""

    def _begin(self) -> None:
        self._captured.clear()

    def capture(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store the stream ``hidden (+ residual)``, [tokens, hidden], at a layer boundary."""
        self._store(layer_id, hidden, residual)
        self._captured.add(layer_id)

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a ``SupportsEagle3`` model collected, one tensor a layer id, ascending."""
        ascending = sorted(self.layer_ids)
        if len(aux_hidden_states) != len(ascending):
            raise RuntimeError(
                f"the model returned {len(aux_hidden_states)} auxiliary hidden states for the "
                f"layer ids {ascending}: its set_aux_hidden_state_layers is not honoured"
            )
        for layer_id, hidden in zip(ascending, aux_hidden_states, strict=True):
            self.capture(layer_id, hidden, None)

    def end_step(self) -> None:
        """Every boundary must have been seen: a row that was not written is never served."""
        missing = self.layer_ids - self._captured
        if missing:
            raise RuntimeError(
                f"the model did not hand over the hidden states of layers {sorted(missing)}: it "
                "has to run its layers through run_decoder_layers or implement SupportsEagle3"
            )
