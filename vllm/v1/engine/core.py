"""The engine core: requests in, steps, tokens and deliveries out. No text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.capabilities import settle_hybrid_manager
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.exceptions import Failure, FailureError, FailureKind, NotReadyError, kind_of
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.steering import SteeringSpec, check_fit
from vllm.utils.boundaries import NORM, LayerId, num_layers_to_run
from vllm.utils.interrupts import is_interrupt
from vllm.utils.math_utils import cdiv
from vllm.utils.text import error_text
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    describe,
    estimate_max_model_len,
    get_kv_cache_configs,
    most_useful_bytes,
    plan_layout,
)
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, ExtractionSpec, FinishReason
from vllm.v1.engine.core_messages import EngineStats, WorkerCall
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.wave import Wave
from vllm.v1.executor import create_executor
from vllm.v1.outputs import ModelRunnerOutput, PendingOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

DELIVERY_POLL_SECONDS = 0.0005
"""Pause between polls when other threads are writing all that is left."""
MIN_RETAINED_SNAPSHOTS = 16
_CALLS_WITHOUT_EFFECT = ("is_sleeping", "add_lora", "remove_lora", "retire_lora")
"""Methods of workers that change nothing that requests have computed."""
_OLD_TABLES = (
    "weights were replaced while the request was kept, and its adapter has tables of the "
    "model (embeddings, LM head), which are compared when it is read: send the request again"
)


@dataclass
class _StartedStep:
    scheduled: SchedulerOutput
    pending: PendingOutput | None
    """The work under way; None: the step could not be started."""
    has_failed: bool = False


class EngineCore:
    """Scheduler and executor of one engine.

    The constructor raises ValueError when the configuration cannot be served.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        if (transfer := vllm_config.connector_config) is not None:
            KVConnectorFactory.get_connector_class(transfer).check_config(vllm_config)
        self._publisher = EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_rank
        )
        with ExitStack() as undo:
            undo.callback(self._publisher.shutdown)
            self.executor = create_executor(vllm_config)
            undo.callback(self.executor.shutdown)
            self.kv_cache_config = self._initialize_kv_caches()
            self.scheduler = self._make_scheduler(self.kv_cache_config)
            undo.pop_all()
        speculative = vllm_config.speculative_config
        self._in_flight: deque[_StartedStep] = deque()
        self._keeps_states = self._was_called = False  # while requests are frozen
        self.wave = Wave() if self.executor.shares_experts else None
        """The steps of all engines, if they share experts."""
        self._deepest_layer: int | None = None
        if speculative is not None:
            self._deepest_layer = self._depth_of(speculative.hidden_state_layer_ids)

    @property
    def _depth_with_norm(self) -> int:
        return 1 + self.vllm_config.model_config.get_total_num_hidden_layers()

    def _depth_of(self, layer_ids: Sequence[LayerId]) -> int:
        """Return how far rows of these layers run. ValueError: the model has no final norm."""
        if NORM in layer_ids and (reason := self.executor.no_norm_reason()) is not None:
            architectures = self.vllm_config.model_config.architectures
            raise ValueError(
                f"layers={list(layer_ids)}: {', '.join(architectures)} has no state after a final "
                f"norm: {reason}; leave {NORM!r} out (embed, classify and reward read it)"
            )
        num_layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        return num_layers_to_run(layer_ids, num_layers)

    def _initialize_kv_caches(self) -> KVCacheConfig:
        config = self.vllm_config
        specs = self.executor.get_kv_cache_spec()
        memory = self.executor.determine_available_memory()
        layout = plan_layout(specs, config.cache_config)
        if config.model_config.auto_fit_max_model_len:
            self._fit_max_model_len(estimate_max_model_len(config, layout, memory))
        if config.cache_config.kv_cache_memory_bytes is None:  # no size was asked for
            memory = min(memory, most_useful_bytes(config, layout))
        (plan,) = get_kv_cache_configs(config, [specs], [memory])
        config.cache_config.num_gpu_blocks = plan.num_blocks
        self._record_block_size(plan)
        for line in describe(plan):
            logger.info("%s", line)
        self.executor.initialize_from_config(plan)
        return plan

    def _fit_max_model_len(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise ValueError(
                "max_model_len=-1: the KV pool has no room for a single token; raise "
                "kv_cache_memory_bytes or gpu_memory_utilization"
            )
        self.vllm_config.set_max_model_len(num_tokens)
        logger.info("max_model_len=-1: %d tokens fit into the KV pool", num_tokens)

    def _record_block_size(self, plan: KVCacheConfig) -> None:
        """Set the attention block size in the cache config, where upstream's readers look."""
        cache_config = self.vllm_config.cache_config
        spec = plan.leading_spec
        if spec is None:
            return
        if cache_config.block_size not in (None, spec.block_size):
            logger.warning(
                "block_size=%s: a block of %d tokens is used, the smallest that holds one "
                "recurrent state",
                cache_config.block_size,
                spec.block_size,
            )
        cache_config.block_size = spec.block_size

    def _make_scheduler(self, plan: KVCacheConfig) -> Scheduler:
        config = self.vllm_config
        chunk_tokens = 1
        if plan.recurrent_group_ids:
            chunk_tokens = config.device_config.platform.recurrent_chunk_tokens
        events = config.kv_events_config
        manager = KVCacheManager(
            plan,
            enable_caching=config.cache_config.enable_prefix_caching,
            keeps_prefixes=KVConnectorFactory.keeps_prefixes(config),
            snapshot_interval=snapshot_interval(config, plan),
            max_retained_hidden_blocks=self._retained_hidden_blocks(plan),
            max_retained_snapshots=self._retained_snapshots(plan),
            state_grain=max(HASH_TOKENS, chunk_tokens),
            notes_events=bool(events and events.enable_kv_cache_events),
        )
        transfer = config.kv_transfer_config or KVTransferConfig()
        return Scheduler(
            config.scheduler_config,
            plan,
            manager,
            max_model_len=config.model_config.max_model_len,
            chunk_alignment=chunk_tokens,
            max_step_cells=config.max_step_cells,
            longrope_limit=config.model_config.longrope_limit,
            connector=self._make_connector(plan),
            load_failure_policy=transfer.kv_load_failure_policy,
            timeout_seconds=transfer.kv_timeout_seconds,
        )

    def _make_connector(self, plan: KVCacheConfig) -> KVConnectorBase_V1 | None:
        if self.vllm_config.connector_config is None:
            return None
        if len(plan.kv_cache_groups) > 1:  # the model's config need not have said so
            reason = f"has {len(plan.kv_cache_groups)} groups of layers"
            settle_hybrid_manager(self.vllm_config, reason)
        with self.executor.groups():
            connector = KVConnectorFactory.create_connector(
                self.vllm_config, KVConnectorRole.SCHEDULER, plan
            )
            self.executor.init_kv_output_aggregator(connector)
        if metadata := self.executor.get_kv_connector_handshake_metadata():
            connector.set_xfer_handshake_metadata_pp_aware(metadata)
        return connector

    def _retained_hidden_blocks(self, plan: KVCacheConfig) -> int:
        limit = self.vllm_config.cache_config.hidden_state_cache_bytes
        if limit is None:
            limit = self.vllm_config.device_config.platform.retained_row_bytes
        return plan.num_blocks if limit is None else limit // plan.block_bytes

    def _retained_snapshots(self, plan: KVCacheConfig) -> int:
        limit = self.vllm_config.device_config.platform.retained_snapshot_bytes
        if limit is None:
            return plan.num_blocks
        snapshot_bytes = max(1, len(plan.recurrent_group_ids)) * plan.block_bytes
        return max(MIN_RETAINED_SNAPSHOTS, limit // snapshot_bytes)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request.

        ValueError: the connector cannot serve it, or it can never fit the pool. EngineDeadError:
        a rank has ended.
        """
        if self.executor.dead_because is not None:
            raise EngineDeadError(self.executor.dead_because)
        if (reason := self.executor.not_ready_reason()) is not None:
            raise NotReadyError(reason)
        request = Request(message)
        needs_logits = (
            request.max_tokens != 0
            or request.sampling_params.prompt_logprobs is not None
            or (message.extraction is not None and message.extraction.top_logprobs != 0)
        )
        if needs_logits and (reason := self.executor.no_head_reason()) is not None:
            raise ValueError(
                f"{', '.join(self.vllm_config.model_config.architectures)} generates nothing and "
                f"has no log-probabilities: {reason}; use extract() without top_logprobs, or "
                "max_tokens=0 with a connector, or a checkpoint that has its LM head"
            )
        if specs := message.sampling_params.steering_specs:
            self._check_steering(specs)
        if message.extraction is not None:
            if self._deepest_layer is not None:
                raise ValueError(
                    "extract() hands rows to its caller, but this engine gives them to a KV "
                    "connector (speculative_config): make an engine without it, or use generate()"
                )
            request.extraction, depth = self._measure(message.extraction)
            request.num_layers_to_run = None if request.generates_rows else depth
        elif not needs_logits:
            request.num_layers_to_run = self._deepest_layer
        if request.num_layers_to_run is not None:
            request.num_layers_to_run = max(request.num_layers_to_run, self._least_layers_to_run)
        if message.lora_request is None:
            self.scheduler.add_request(request)
            return
        digest = self.executor.choose_adapter(request.request_id, message.lora_request)
        request.cache_salt = f"{request.cache_salt or ''}\0adapter:{digest}"
        try:
            self.scheduler.add_request(request)
        except BaseException:
            self.executor.drop_adapter(request.request_id)
            raise

    def _check_steering(self, specs: Sequence[SteeringSpec]) -> None:
        """Raise ValueError if the model cannot add these vectors."""
        model_config = self.vllm_config.model_config
        if (reason := self.executor.no_steering_reason()) is not None:
            architectures = ", ".join(model_config.architectures)
            raise ValueError(f"steering: {architectures} cannot be steered: {reason}")
        num_layers, width = model_config.get_total_num_hidden_layers(), model_config.get_row_size()
        check_fit(specs, num_layers, width)

    def _measure(self, spec: ExtractionSpec) -> tuple[ExtractionSpec, int]:
        """Return the spec with the size of its rows, and how many layers run for it.

        ValueError: the model cannot hand out what it asks for.
        """
        points = self.executor.find_hooks(spec.hooks)
        model_config = self.vllm_config.model_config
        cell_bytes = model_config.get_row_size() * model_config.dtype.itemsize
        hook_bytes = sum(point.form.width * point.form.dtype.itemsize for point in points)
        if points:
            spec = msgspec.structs.replace(spec, hook_cells=cdiv(hook_bytes, cell_bytes))
        depth = max([self._depth_of(spec.layer_ids), *(point.depth for point in points)])
        return spec, self._depth_with_norm if spec.top_logprobs else depth

    @property
    def _least_layers_to_run(self) -> int:
        """Layers that run for any rows, because a field is made from them or a connector reads
        all caches."""
        model_config, connector = self.vllm_config.model_config, self.scheduler.connector
        num_layers = model_config.get_total_num_hidden_layers()
        if connector is not None and connector.reads_all_layers:
            return num_layers
        fields = model_config.row_field_classes
        return max((one.deepest_layer(num_layers) for one in fields), default=0)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests and everything that belongs to them."""
        self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def finish_requests(self, stops: Mapping[str, str]) -> None:
        """End requests whose text reached a stop string: request id -> the string."""
        for request_id, stop in stops.items():
            self.scheduler.finish_requests([request_id], FinishReason.STOP, stop)

    def has_unfinished_requests(self) -> bool:
        """Return whether :meth:`step` has something to do."""
        return self.scheduler.has_unfinished_requests() or bool(self._in_flight)

    def take_part(self) -> None:
        """Compute what a step of the other engines that share experts needs of this one."""
        assert self.wave is not None
        try:
            with self.wave.step(has_work=False):
                self.executor.take_part()
        except Exception as error:
            failure = _failure_of(error)
            if failure.kind is not FailureKind.ENGINE_DEAD:
                logger.error("a step of other engines failed here", exc_info=error)
            self._take_death(failure)
        if not self.wave.has_tokens:
            time.sleep(DELIVERY_POLL_SECONDS)

    def step(self) -> EngineCoreOutputs:
        """Plan and start one step, and return results.

        The results are those of this step or, with ``async_scheduling``, of the one before
        it, while this one runs. A step that fails ends its own requests and no others.
        """
        scheduled = self.scheduler.schedule()
        with nullcontext() if self.wave is None else self.wave.step(has_work=True):
            self._in_flight.append(self._start(scheduled))
        has_work = scheduled.total_num_scheduled_tokens > 0
        num_left = 1 if has_work and self.vllm_config.scheduler_config.async_scheduling else 0
        result = EngineCoreOutputs()
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            result.add(self._finish(step))
            if step.has_failed:  # steps that were planned before this may have failed with it
                num_left = 0
        is_quiet = not (has_work or result.outputs or (self.wave and self.wave.has_tokens))
        if is_quiet and self.scheduler.num_unfinished_requests():
            time.sleep(DELIVERY_POLL_SECONDS)
        return result

    def _start(self, scheduled: SchedulerOutput) -> _StartedStep:
        try:
            return _StartedStep(scheduled, self.executor.execute_model(scheduled))
        except BaseException as error:
            if is_interrupt(error):
                self._interrupt_step(scheduled)
                raise
            self._fail_step(scheduled, error)
            return _StartedStep(scheduled, None)

    def _interrupt_step(self, scheduled: SchedulerOutput) -> None:
        interrupted = Failure(FailureKind.ABORTED, "interrupted")
        self.scheduler.fail_step(scheduled, FinishReason.ABORT, interrupted)

    def _finish(self, step: _StartedStep) -> EngineCoreOutputs:
        output = ModelRunnerOutput()
        try:
            if step.pending is not None:
                output = step.pending.result()
        except BaseException as error:
            if is_interrupt(error):  # with pipeline stages the pass may only run here
                self._interrupt_step(step.scheduled)
                raise
            assert step.pending is not None
            output.kv_connector_output = step.pending.output.kv_connector_output
            step.has_failed = True
            self._fail_step(step.scheduled, error)
        result = self.scheduler.update_from_output(step.scheduled, output)
        self._publish(result)
        return result

    def _publish(self, result: EngineCoreOutputs) -> None:
        """Publish what entered and left caches; the pool's events precede the connector's."""
        events = [*self.scheduler.kv_cache_manager.take_events(), *result.kv_cache_events]
        result.kv_cache_events = events
        if events:
            self._publisher.publish(KVEventBatch(time.time(), events))

    def _fail_step(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        failure = _failure_of(error)
        if failure.kind is FailureKind.ABORTED:  # it was to follow one that was interrupted
            self._interrupt_step(scheduled)
            return
        cause = None if failure.kind is FailureKind.ENGINE_DEAD else error
        logger.error("a step failed; its requests end with an error: %s", failure, exc_info=cause)
        self.scheduler.fail_step(scheduled, FinishReason.ERROR, failure)
        self._take_death(failure)

    def _take_death(self, failure: Failure) -> None:
        if failure.kind is FailureKind.ENGINE_DEAD:  # of this engine, or of one with its experts
            self.executor.die(failure.message)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Call every worker between two steps; returns their results."""
        while self._in_flight and not self.scheduler.num_unfinished_requests():
            self._finish(self._in_flight.popleft())
        self._was_called |= call.method not in _CALLS_WITHOUT_EFFECT
        self._keeps_states &= call.method != "sleep"
        return self.executor.collective_rpc(call)

    def freeze(self, *, keeps_states: bool) -> EngineCoreOutputs:
        """Compute nothing until :meth:`thaw`; return the results of the steps under way.

        keeps_states: what requests have computed stays valid, whatever workers are called for.
        """
        was_frozen, self.scheduler.is_frozen = self.scheduler.is_frozen, True
        self._keeps_states = keeps_states and (self._keeps_states or not was_frozen)
        self._was_called &= was_frozen
        result = EngineCoreOutputs()
        while self._in_flight:
            result.add(self.step())
        return result

    def thaw(self) -> None:
        """Let frozen requests go on. They start again from their tokens if a worker was called
        that may have changed the weights or the pool, and fail if no step can run, or if their
        adapters have tables of earlier weights."""
        self.scheduler.is_frozen = False
        if (reason := self.executor.not_ready_reason()) is not None:
            self.scheduler.fail_frozen(Failure(FailureKind.NOT_READY, reason))
        elif self._was_called and not self._keeps_states:
            self.scheduler.starts_again = True
            outdated = Failure(FailureKind.NOT_READY, _OLD_TABLES)
            requests = self.executor.outdated_requests()
            self.scheduler.finish_requests(requests, FinishReason.ERROR, failure=outdated)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; see :meth:`vllm.LLM.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache(reset_connector=reset_connector)

    def shutdown(self) -> None:
        """End workers and connectors. The engine cannot be used afterwards."""
        self.scheduler.shutdown()
        self._publisher.shutdown()
        self.executor.shutdown()


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, FailureError):
        return error.failure
    kind = kind_of(error, FailureKind.STEP_FAILED)
    if isinstance(error, torch.OutOfMemoryError):
        kind = FailureKind.OUT_OF_MEMORY
    return Failure(kind, error_text(error))


SNAPSHOT_GRAIN_TOKENS = 64
MAX_SNAPSHOT_INTERVAL_TOKENS = 256


def snapshot_interval(vllm_config: VllmConfig, plan: KVCacheConfig) -> int:
    """Tokens between two kept recurrent states (``mamba_block_size``, or from the sizes).

    By default an eighth of the tokens whose keys and values take as many bytes as one
    state: 64 for small models, at most 256.
    """
    configured = vllm_config.cache_config.mamba_block_size
    if configured is not None:
        return configured
    num_recurrent, spec = len(plan.recurrent_group_ids), plan.leading_spec
    if not num_recurrent or spec is None:
        return SNAPSHOT_GRAIN_TOKENS
    tokens = spec.tokens_per_block * num_recurrent
    eighth = tokens // 8 // SNAPSHOT_GRAIN_TOKENS * SNAPSHOT_GRAIN_TOKENS
    return min(max(eighth, SNAPSHOT_GRAIN_TOKENS), MAX_SNAPSHOT_INTERVAL_TOKENS)
