"""The data that a forward pass needs beyond its arguments, for the time of that pass.

Layers deep inside a model (also out-of-tree ones) find their metadata here instead of
getting it through every call. There is one context per thread, so that several engines
in a process do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from vllm.utils.boundaries import LayerId

HIDDEN_STATES = "hidden_states"
"""The source of the stream at boundaries."""


class RowSink(Protocol):
    """Takes the values that are kept of tokens from the model that computes them."""

    layer_ids: frozenset[LayerId]
    """Boundaries that are requested (``vllm.utils.boundaries``)."""

    def wants(self, source: str) -> bool:
        """Return whether anything is kept of the values put under this name."""
        return source == HIDDEN_STATES and bool(self.layer_ids)

    def indexes_of(self, source: str) -> frozenset[LayerId]:
        """Return the indexes of this source whose values are kept."""
        return self.layer_ids if source == HIDDEN_STATES else frozenset()

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        """Store values of the next tokens of the step, [tokens, ...] each; they are copied at once.

        "hidden_states": ``(hidden, residual)``, both [tokens, hidden], whose sum is the stream at
        the boundary ``index``; residual None: hidden alone. "hooks": the values at the hook point
        with the first name ``index`` (``model_executor/hook_points.py``). Other sources: see their
        captures (``model_executor/captures.py``); ``index`` counts the modules of a capture.
        """
        ...

    def take_logits(
        self,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        sampled: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Store what is kept of logits, from the model's output [tokens, hidden]; here nothing.

        sampled: returns the tokens sampled after these, int64 [tokens], -1 for none.
        """
        return

    def take_aux_hidden_states(self, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        """Store what a model collected itself, one tensor for each layer id, ascending."""
        raise RuntimeError(f"{type(self).__name__} takes the stream as it passes")

    def end_step(self) -> None:
        """Raise RuntimeError if a boundary was not handed over; here nothing is checked."""
        return


@dataclass(frozen=True)
class CachedLayer:
    """A layer as connectors see it during the pass."""

    kv_cache: Any
    """The view that ``register_kv_caches`` gave."""


class Addition(NamedTuple):
    """A vector that is added to the stream of some tokens of a step."""

    tokens: slice | torch.Tensor
    """Tokens of the flat batch: a slice, or int64."""
    vector: torch.Tensor
    """float32 [hidden]"""
    norm_match: bool
    """True: it is multiplied by the norm of the stream at the token."""


Additions = Mapping[int, Sequence[Addition]]
"""Vectors to add to the stream, by boundary."""


class Steering(NamedTuple):
    """The vectors that are added in a step."""

    additions: Additions
    """The vectors for the flat batch."""
    of_request: Callable[[int, range], Additions]
    """Returns those for a pass over some positions of one request, by its index in the step."""


@runtime_checkable
class _HasSlots(Protocol):
    slot_mapping: torch.Tensor


class RowAdapters(Protocol):
    """The adapters (LoRA) of the rows that the products of a pass have."""

    def add(self, weight: Any, table: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add what they change in a product with a weight. x: [rows, n]; out: [rows, m]."""
        ...

    def parts_of(
        self, weight: Any, table: int, num_rows: int
    ) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Yield what they change in a product of so many rows, each with its rows; None: all."""
        ...

    def part(self, rows: torch.Tensor | slice) -> RowAdapters:
        """Return those of products that have only some rows, or have them repeatedly."""
        ...

    def of_use(self, use: int) -> RowAdapters:
        """Return those of one use of modules that several layers share."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """One step's metadata by layer name, and the sink of captured rows."""

    attn_metadata: Mapping[str, Any]
    row_sink: RowSink | None = None
    num_layers_to_run: int | None = None
    """Decoder layers to run, before the final norm; one more than the model has: all of them and
    the norm, but no LM head. None: everything."""
    no_compile_layers: Mapping[str, CachedLayer] = field(default_factory=dict)
    """Layers with a cache, by name, if there is a connector."""
    steering: Steering | None = None
    """Vectors to add to the stream; None: none in this step."""
    rotary_positions: torch.Tensor | None = None
    """int64 [tokens], for a model with longrope: positions in its tables, in which the table for
    long sequences follows the one for short ones."""
    adapters: RowAdapters | None = None
    """Adapters of the tokens; None: no token has one."""
    gathered_hooks: frozenset[str] = frozenset()
    """Hook points, by their first names, whose values all ranks have to gather."""
    shared_tokens: int = 0
    """Number of tokens of the pass if ranks share them between branches; 0: each has all."""
    gathered_boundaries: frozenset[LayerId] = frozenset()
    """Boundaries at which these ranks have to gather the stream."""

    @property
    def slot_mapping(self) -> dict[str, torch.Tensor]:
        """Slots of the step's tokens in the cache of each layer that keeps tokens, int64."""
        metadata = self.attn_metadata.items()
        return {name: one.slot_mapping for name, one in metadata if isinstance(one, _HasSlots)}


class _Local(threading.local):
    context: ForwardContext | None = None


_local = _Local()


def get_forward_context() -> ForwardContext:
    """Return the context of the forward pass that runs on this thread."""
    if _local.context is None:
        raise RuntimeError(
            "no forward context: a model layer was called outside set_forward_context"
        )
    return _local.context


def current_rotary_positions() -> torch.Tensor | None:
    """Rotary positions of the pass that runs on this thread; None: they are the tokens'."""
    return None if _local.context is None else _local.context.rotary_positions


def current_adapters() -> RowAdapters | None:
    """Adapters of the rows in the pass that runs on this thread; None: there are none."""
    return None if _local.context is None else _local.context.adapters


def current_shared_tokens() -> int:
    """Number of tokens of the pass on this thread if ranks share them; 0: each rank has all."""
    return 0 if _local.context is None else _local.context.shared_tokens


def current_row_sink() -> RowSink | None:
    """The sink of rows in the pass that runs on this thread; None: nothing is kept."""
    return None if _local.context is None else _local.context.row_sink


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` this thread's context inside the block."""
    previous, _local.context = _local.context, context
    try:
        yield context
    finally:
        _local.context = previous


def only_rows(rows: torch.Tensor | slice) -> AbstractContextManager[object]:
    """Return a block whose products have only some rows of the pass, or have them repeatedly."""
    adapters = current_adapters()
    return nullcontext() if adapters is None else _with_adapters(adapters.part(rows))


def one_use(use: int) -> AbstractContextManager[object]:
    """Return a block that is one use of modules that several layers share."""
    adapters = current_adapters()
    return nullcontext() if adapters is None else _with_adapters(adapters.of_use(use))


def _with_adapters(adapters: RowAdapters) -> AbstractContextManager[object]:
    return set_forward_context(replace(get_forward_context(), adapters=adapters))
