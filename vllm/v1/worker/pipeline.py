"""The passes of a pipeline stage: what comes from the stage before, and what goes to the next.

    stage 0                                 last stage (in the engine's process)
    embeddings, layers 0 .. k - 1     -->   layers k .., norm, head
    values kept of them               -->   rows of requests
    tokens                            <--   sampled

Every stage knows from a step's plan which values requests keep. It keeps those of its own layers
for the time of the pass (:class:`RelaySink`) and hands them on with the stream; the last stage puts
them into the step's rows as if it had computed them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.rank_share import is_on_all_ranks
from vllm.distributed.parallel_state import get_pipeline_links
from vllm.forward_context import HIDDEN_STATES, RowSink, get_forward_context
from vllm.sequence import IntermediateTensors
from vllm.utils.boundaries import LayerId
from vllm.utils.pipeline_stage import PipelineStage
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.rows.fields.activations import HOOKS, layer_of
from vllm.v1.worker.input_batch import StepBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.hook_points import HookPoints
    from vllm.v1.core.kv_cache_utils import PoolLayout

Values = list[tuple[str, LayerId, int]]
"""Source and index of what was put, and its number of tensors."""


class RelaySink(RowSink):
    """Keeps what is put during a pass, to hand it on."""

    def __init__(self, wanted: dict[str, set[LayerId]]) -> None:
        self._wanted = wanted
        self.layer_ids = frozenset(wanted.get(HIDDEN_STATES, ()))
        self._values: Values = []
        self._tensors: list[torch.Tensor] = []

    def wants(self, source: str) -> bool:
        return source in self._wanted

    def indexes_of(self, source: str) -> frozenset[LayerId]:
        return frozenset(self._wanted.get(source, ()))

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        present = [value.clone() for value in values if value is not None]
        self._values.append((source, index, len(present)))
        self._tensors += present

    def take(self) -> tuple[Values, list[torch.Tensor]]:
        """Return everything that was put."""
        return self._values, self._tensors


class KeptOfRequests:
    """Values that requests keep, known to all ranks."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        fields = vllm_config.model_config.row_field_classes
        self._of_all: dict[str, set[LayerId]] = {one.source: set() for one in fields}
        self._always = speculative is not None
        if speculative is not None:
            self._of_all[HIDDEN_STATES] = set(speculative.hidden_state_layer_ids)
        self._of_request: dict[str, dict[str, set[LayerId]]] = {}
        self._gathered_hooks: dict[str, set[str]] = {}

    def update(self, scheduled: SchedulerOutput, points: Callable[[], HookPoints]) -> None:
        """Take in which requests begin and end."""
        for req_id in scheduled.finished_req_ids:
            self._of_request.pop(req_id, None)
            self._gathered_hooks.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            spec = new.extraction
            if spec is None:
                continue
            kept: dict[str, set[LayerId]] = defaultdict(set)
            kept[HIDDEN_STATES].update(spec.layer_ids)
            for name in spec.hooks:
                point = points().find(name)
                if point.module is None:
                    kept[HIDDEN_STATES].add(point.depth)
                else:
                    kept[HOOKS].add(point.names[0])
                if point.is_gathered:
                    self._gathered_hooks.setdefault(new.req_id, set()).add(point.names[0])
            self._of_request[new.req_id] = kept

    def gathered_hooks(self, batch: StepBatch) -> frozenset[str]:
        """Return the hook points of a step's requests whose values the ranks may have in parts."""
        if not self._gathered_hooks:
            return frozenset()
        found = (self._gathered_hooks.get(state.req_id, ()) for state in batch.states)
        return frozenset().union(*found)

    def boundaries(self, batch: StepBatch) -> frozenset[LayerId]:
        """Return the boundaries whose stream a step's requests keep."""
        always = self._of_all.get(HIDDEN_STATES, set())
        kept = (self._of_request.get(state.req_id, {}) for state in batch.states)
        return frozenset(always).union(*(one.get(HIDDEN_STATES, ()) for one in kept))

    def sink(self, batch: StepBatch) -> RelaySink | None:
        """Return the sink of a step's pass; None: nothing is kept."""
        kept = [self._of_request[s.req_id] for s in batch.states if s.req_id in self._of_request]
        if not kept and not self._always:
            return None
        wanted = {source: set(indexes) for source, indexes in self._of_all.items()}
        for one in kept:
            for source, indexes in one.items():
                wanted.setdefault(source, set()).update(indexes)
        return RelaySink(wanted)


class Pipeline:
    """The passes of one process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        self.stage = vllm_config.model_config.stage_of(parallel)
        self.relays = not self.stage.is_last and parallel.rank % parallel.ranks_per_stage == 0
        """True if this process hands on what requests keep: the first of a stage does."""
        self.kept = KeptOfRequests(vllm_config)
        self.knows_kept = self.relays or parallel.ranks_per_stage > 1

    def reads_embeddings(self, model: Any) -> bool:
        """Return whether the stage's part of the model begins with embeddings."""
        return self.stage.is_first or bool(model.layers_read_embeddings)

    def run(
        self,
        model: Callable[..., Any],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        options: dict[str, Any],
    ) -> Any:
        """Run the stage's part of the model; returns what the model returns, [tokens, hidden]."""
        if self.stage.is_whole:
            return model(token_ids, positions, **options)
        context, links, stage = get_forward_context(), get_pipeline_links(), self.stage
        depth, sink = context.num_layers_to_run, context.row_sink
        stream: IntermediateTensors | None = None
        if links.before is not None:
            stream = _receive(links.before.receive(), sink)
        hidden: Any = None
        if stage.takes_part(depth):
            hidden = model(token_ids, positions, stream, **options)
        if links.after is not None:
            following = PipelineStage(stage.end_layer, stage.num_layers, stage.num_layers)
            sent = hidden.tensors if hidden is not None and following.takes_part(depth) else {}
            values, tensors = sink.take() if isinstance(sink, RelaySink) else ([], [])
            links.after.send((list(sent), values), [*sent.values(), *tensors])
        if isinstance(hidden, torch.Tensor):
            return hidden
        return torch.empty(len(token_ids), 0)  # nobody reads it

    def hand_out_tokens(self, token_ids: torch.Tensor) -> None:
        """Tell the other stages which tokens were sampled, int64 [requests]."""
        for link in get_pipeline_links().tokens_to:
            link.send(None, [token_ids])

    def sampled_elsewhere(self) -> torch.Tensor:
        """Return the tokens that the last stage sampled, int64 [requests]."""
        link = get_pipeline_links().tokens_from
        assert link is not None
        _, (token_ids,) = link.receive()
        return token_ids


def pool_share(vllm_config: VllmConfig, layout: PoolLayout) -> float:
    """Return the most bytes of a block that one stage writes, as a share of the block.

    A stage's pool has places for the caches of all layers, of which it touches only its own.
    """
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    most = 0.0
    for number in range(parallel.pipeline_parallel_size):
        rank = replace(parallel, rank=number * parallel.ranks_per_stage)
        stage = model_config.stage_of(rank)
        own = range(stage.first_layer, stage.end_layer)
        for group in layout.groups:
            if group.kv_cache_spec.holds_rows or is_on_all_ranks(vllm_config):
                return 1.0  # rows are in the engine's process alone; connectors move whole blocks
            layers = [layer_of(name) for name in group.layer_names]
            # What belongs to no layer is in every stage.
            count = sum(layer is None or layer in own for layer in layers)
            most = max(most, count / len(layers))
    return most


def _receive(
    message: tuple[Any, Iterable[torch.Tensor]], sink: RowSink | None
) -> IntermediateTensors | None:
    """Put the values of earlier stages into the sink; returns the stream, None: there is none.

    Some may not be wanted any more: those of tokens that are computed again after a preemption.
    """
    (names, values), tensors = message
    arriving = iter(tensors)
    stream = {name: next(arriving) for name in names}
    for source, index, count in values:
        parts: list[torch.Tensor | None] = [next(arriving) for _ in range(count)]
        if source == HIDDEN_STATES and count == 1:
            parts.append(None)  # no residual
        if isinstance(sink, RelaySink) or (sink is not None and index in sink.indexes_of(source)):
            sink.put(source, index, *parts)
    return IntermediateTensors(stream) if stream else None
