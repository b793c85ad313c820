"""What a forward pass needs beyond its arguments, for the time of that pass.

Layers deep inside a model (also out-of-tree ones) find their metadata here instead
of having it handed through every call. One context per thread: several engines in a
process do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

HIDDEN_STATES = "hidden_states"
"""The source of the stream at boundaries."""


class RowSink(Protocol):
    """Takes what is kept of tokens from the model that computes them."""

    layer_ids: frozenset[int]
    """Boundaries asked for: id i is the stream that enters layer i."""

    def wants(self, source: str) -> bool:
        """Whether anything is kept of what is put under this name."""
        return source == HIDDEN_STATES and bool(self.layer_ids)

    def put(self, source: str, index: int, *values: Any) -> None:
        """Store values of the next tokens of the step, [tokens, ...] each; they are copied at once.

        "hidden_states": the stream at the boundary ``index``, ``(hidden, residual)``, both
        [tokens, hidden]: their sum; residual None: hidden alone. Other sources: what their capture
        says (``model_executor/captures.py``), ``index`` counts its modules.
        """
        ...

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a model collected itself, one tensor for each layer id, ascending."""
        raise RuntimeError(f"{type(self).__name__} takes the stream as it passes")

    def end_step(self) -> None:
        """RuntimeError when a boundary was not handed over, where anybody looks for that."""
        return


@dataclass(frozen=True)
class CachedLayer:
    """A layer as connectors see it that ask in the pass."""

    kv_cache: Any
    """The view that ``register_kv_caches`` gave."""


@dataclass(frozen=True)
class ForwardContext:
    """One step's metadata by layer name, and where captured rows go."""

    attn_metadata: Mapping[str, Any]
    row_sink: RowSink | None = None
    num_layers_to_run: int | None = None
    """Decoder layers to run; None: all of them."""
    no_compile_layers: Mapping[str, CachedLayer] = field(default_factory=dict)
    """Layers with a cache, by name, where there is a connector."""
    rotary_positions: torch.Tensor | None = None
    """int64 [tokens], of a model with longrope: positions in its tables, in which the one for long
    sequences stands behind the one for short ones."""


class _Local(threading.local):
    context: ForwardContext | None = None


_local = _Local()


def get_forward_context() -> ForwardContext:
    """The context of the forward pass that runs on this thread."""
    if _local.context is None:
        raise RuntimeError(
            "no forward context: a model layer was called outside set_forward_context"
        )
    return _local.context


def current_rotary_positions() -> torch.Tensor | None:
    """Those of the pass that runs on this thread; None: positions are those of the tokens."""
    return None if _local.context is None else _local.context.rotary_positions


def current_row_sink() -> RowSink | None:
    """What takes rows in the pass that runs on this thread; None: nothing is kept."""
    return None if _local.context is None else _local.context.row_sink


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the one of this thread inside the block."""
    previous, _local.context = _local.context, context
    try:
        yield context
    finally:
        _local.context = previous
