"""What takes the residual stream from a model, whichever way the model hands it over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.ops.rows import capture_rows
from vllm.utils.expert_trace import encode_choices


class CaptureTarget(NamedTuple):
    """Where rows of one step's tokens go."""

    row_cache: torch.Tensor
    """Strided view [blocks, rows_per_block, layers, hidden]."""
    slots: torch.Tensor
    """int64 [tokens], ``block * rows_per_block + row``; -1: nobody wants the token's."""
    layer_ids: tuple[int, ...]
    """Of its columns, in any order, duplicates too."""
    traces: torch.Tensor | None = None
    """int16 [blocks, rows_per_block, layers with experts, words], for choices of experts."""


class RowCapture:
    """The ``RowSink`` of one forward pass, which notices when a boundary was not handed over.

    Models that use the shared decoder loop hand the stream over as it passes
    (:meth:`capture`); models that collect auxiliary hidden states themselves
    (``SupportsEagle3``) hand all of them over at the end (:meth:`take_aux_hidden_states`).
    """

    def __init__(self, targets: Sequence[CaptureTarget]) -> None:
        self._columns: dict[int, list[tuple[CaptureTarget, int]]] = defaultdict(list)
        for target in targets:
            for column, layer_id in enumerate(target.layer_ids):
                self._columns[layer_id].append((target, column))
        self.layer_ids = frozenset(self._columns)
        self._captured: set[int] = set()
        self._traced = [target for target in targets if target.traces is not None]
        self._num_told: Counter[int] = Counter()
        """Tokens for which a layer has told its choice."""

    @property
    def wants_experts(self) -> bool:
        """Whether choices of experts are to be handed over."""
        return bool(self._traced)

    def capture_choice(self, index: int, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """Store a choice for the next tokens, [tokens, top_k] each."""
        words = encode_choices(experts, weights)
        start = self._num_told[index]
        end = self._num_told[index] = start + len(words)
        for target in self._traced:
            assert target.traces is not None
            # The body: a copy of words that are no numbers.
            capture_rows.body(words, None, target.slots[start:end], index, target.traces)

    def capture(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store the stream ``hidden (+ residual)``, [tokens, hidden], at a layer boundary."""
        for target, column in self._columns[layer_id]:
            # A stream may be float32 in a model of another dtype.
            stream = hidden.to(target.row_cache.dtype)
            capture_rows(stream, residual, target.slots, column, target.row_cache)
        self._captured.add(layer_id)

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a ``SupportsEagle3`` model collected, one tensor a layer id, ascending.

        In whatever dtype it computes: rows have the engine's.
        """
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
        for target in self._traced:
            assert target.traces is not None
            told = {self._num_told[index] for index in range(target.traces.shape[2])}
            if told != {len(target.slots)}:
                raise RuntimeError(
                    f"layers with experts told their choices for {sorted(told)} of "
                    f"{len(target.slots)} tokens"
                )
