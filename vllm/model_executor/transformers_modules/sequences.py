"""The interface of ways to run the requests of a step, and the base of those one by one."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.forward_context import HIDDEN_STATES, Additions, RowSink, get_forward_context
from vllm.model_executor.transformers_modules.boundaries import Boundaries, LayersDoneError
from vllm.model_executor.transformers_modules.cached import Part
from vllm.model_executor.transformers_modules.positions import are_long, rotated_as_long
from vllm.model_executor.transformers_modules.survey import set_attention
from vllm.utils.boundaries import LayerId

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Sequences(nn.Module, ABC):
    """Runs the decoder of a transformers module. NotServableError: it cannot run in this way."""

    takes_embeddings = True
    """True if the decoder takes embeddings instead of ids."""
    output_class: type
    """Class of the decoder's result."""
    layer_names: list[str]
    """Names of the layers with a place in the pool."""
    keeps_states = False
    """True if layers keep states of fixed size in the pool."""
    attends_by = "eager"
    """``attn_implementation`` of its passes."""

    def __init__(
        self, vllm_config: VllmConfig, causal_lm: Any, decoder: Any, boundaries: Boundaries
    ) -> None:
        super().__init__()
        # In a tuple, because it is not a part of this module.
        self._decoders = (decoder,)
        self._boundaries = boundaries
        self._arguments = inspect.signature(decoder.forward).parameters
        self._device = next(decoder.parameters()).device

    reads_all_tokens = False
    """True if a pass needs the stream of all tokens so far from the stage before it."""

    @abstractmethod
    def run(
        self,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of the flat batch; rows go to the context's sink.

        tokens: ``input_ids`` [tokens], or ``inputs_embeds`` [tokens, hidden]. incoming: the stream
        of the stage before this one, [tokens, width]. A stage that is not the last one returns its
        own stream.
        """

    @property
    def _own_layers(self) -> range:
        """Layers of this stage that the step needs."""
        stage, depth = self._boundaries.stage, get_forward_context().num_layers_to_run
        end = stage.end_layer if depth is None else min(depth, stage.end_layer)
        return range(stage.first_layer, end)

    def _hidden_of(
        self,
        decode: Callable[[], Any],
        sink: RowSink | None,
        additions: Additions | None,
        incoming: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result [tokens, hidden] of a pass through the layers that the step needs."""
        try:
            depth = get_forward_context().num_layers_to_run
            with self._boundaries.watch(sink, depth, additions, incoming):
                hidden: torch.Tensor = decode()[0][0]
        except LayersDoneError as done:
            hidden = done.hidden
        return hidden


class EachByItself(Sequences):
    """Runs one request of a step after another, each with the module's own attention."""

    def __init__(
        self, vllm_config: VllmConfig, causal_lm: Any, decoder: Any, boundaries: Boundaries
    ) -> None:
        super().__init__(vllm_config, causal_lm, decoder, boundaries)
        set_attention(causal_lm, "eager")

    def run(
        self,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = get_forward_context()
        layout = context.attn_metadata[self.layer_names[0]].layout
        starts, lengths = (x.tolist() for x in layout.on_host())
        joined = _JoinedRows(context.row_sink)
        is_long = are_long(positions)
        hidden = []
        counts = lengths if self.reads_all_tokens else [b - a for a, b in pairwise(starts)]
        streams = [None] * len(counts) if incoming is None else torch.split(incoming, counts)
        for index, (start, end) in enumerate(pairwise(starts)):
            part = Part(index, start, lengths[index] - (end - start), end - start)
            own = {name: given[start:end] for name, given in tokens.items()}
            with rotated_as_long(None if is_long is None else is_long[start]):
                hidden.append(
                    self._run_request(part, own, positions[start:end], streams[index], joined)
                )
        joined.hand_over()
        return torch.cat(hidden)

    def _pass(
        self,
        decode: Callable[[], Any],
        sink: RowSink,
        part: Part,
        positions: range,
        incoming: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result [tokens, hidden] of a pass over some positions of a request."""
        steering = get_forward_context().steering
        additions = None if steering is None else steering.of_request(part.index, positions)
        return self._hidden_of(decode, sink, additions, incoming)

    @abstractmethod
    def _run_request(
        self,
        part: Part,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None,
        sink: RowSink,
    ) -> torch.Tensor:
        """Run one request; its rows go to ``sink``, in any number of passes."""


class _JoinedRows(RowSink):
    """Collects the rows of all passes of a step and hands them over at the end."""

    def __init__(self, sink: RowSink | None) -> None:
        self._sink = sink
        self.layer_ids = frozenset[LayerId]() if sink is None else sink.layer_ids
        self._rows: dict[tuple[str, LayerId], list[torch.Tensor]] = defaultdict(list)

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        self._rows[source, index].append(values[0].clone())

    def hand_over(self) -> None:
        for (source, index), rows in self._rows.items():
            assert self._sink is not None
            residual = (None,) if source == HIDDEN_STATES else ()
            self._sink.put(source, index, torch.cat(rows), *residual)
