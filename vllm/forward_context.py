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


class RowSink(Protocol):
    """Takes the residual stream at the boundaries of decoder layers."""

    layer_ids: frozenset[int]
    """Boundaries asked for: id i is the stream that enters layer i."""

    def capture(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store the stream ``hidden (+ residual)``, [tokens, hidden], at a boundary."""
        ...

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a model collected itself, one tensor for each layer id, ascending."""
        raise RuntimeError(f"{type(self).__name__} takes the stream as it passes")

    def end_step(self) -> None:
        """RuntimeError when a boundary was not handed over, where anybody looks for that."""
        return


class ExpertSink(Protocol):
    """Takes what layers with a mixture of experts choose."""

    def capture_choice(self, index: int, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """The choice of the index-th such layer for the next tokens of the step.

        experts: int64, weights: float32, both [tokens, top_k].
        """
        ...


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
    expert_sink: ExpertSink | None = None
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


def current_expert_sink() -> ExpertSink | None:
    """Who wants to know what routers choose in the pass that runs on this thread; None: nobody."""
    return None if _local.context is None else _local.context.expert_sink


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the one of this thread inside the block."""
    previous, _local.context = _local.context, context
    try:
        yield context
    finally:
        _local.context = previous
