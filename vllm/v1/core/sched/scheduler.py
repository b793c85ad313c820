"""Who runs in the next step, with how many tokens and in which blocks.

Continuous batching under one token budget: running requests first, in order, then
waiting ones; long prompts in chunks; when the pool is full the last request gives its
blocks back and is computed again later. Blocks and tokens only, never tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.exceptions import Failure, FailureKind, kind_of
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_coordinator import PrefixHit
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.deliveries import Deliveries
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.request_queue import make_queue
from vllm.v1.core.sched.stopping import why_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, ExtractionSpec, FinishReason
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput, SaveStats
from vllm.v1.request import FINISHED_STATUS, Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

logger = init_logger(__name__)


@dataclass
class _Step:
    """What one call of schedule() collects."""

    token_budget: int
    cell_budget: int
    """Hidden states for callers, one for each token and layer."""
    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled: dict[str, int] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)

    def take(self, request: Request, count: int) -> None:
        """Put the next ``count`` tokens of the request into the step."""
        self.num_scheduled[request.request_id] = count
        self.token_budget -= count
        self.cell_budget -= request.num_cells(count)

    def give_back(self, request: Request) -> None:
        """Take the request out again."""
        count = self.num_scheduled.pop(request.request_id)
        self.token_budget += count
        self.cell_budget += request.num_cells(count)


class Scheduler:
    """Queues, budgets and the life of requests; the only writer of :class:`Request`."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        kv_cache_manager: KVCacheManager,
        *,
        max_model_len: int,
        chunk_alignment: int = 1,
        max_step_cells: int = sys.maxsize,
        connector: KVConnectorBase_V1 | None = None,
    ) -> None:
        self.config = scheduler_config
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = max_model_len
        if chunk_alignment > scheduler_config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens={scheduler_config.max_num_batched_tokens} is less than "
                f"one chunk of this model's recurrent kernels: use at least {chunk_alignment}"
            )
        self.chunk_alignment = chunk_alignment
        self.max_step_cells = max_step_cells
        self.connector = connector
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(scheduler_config.policy)
        self.running: list[Request] = []
        self._finished_ids: set[str] = set()  # not yet told to the workers
        self._known_to_workers: set[str] = set()
        num_groups = len(kv_cache_config.kv_cache_groups)
        self._deliveries = Deliveries(self.requests, kv_cache_manager, num_groups, connector)
        self._totals = EngineStats()
        self._num_planned_steps = 0
        # The head of the queue that found no room, and how often blocks had been freed then.
        self._refused: tuple[str, int] | None = None

    # ------------------------------------------------------------------ requests

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, the connector cannot serve the request, or it asks for
                more rows than a step may hand out.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.extraction is not None:
            request.extraction.checked_positions(request.num_prompt_tokens)
            self._check_rows_fit(request, request.extraction)
        if self.connector is not None:
            self.connector.check_request(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def _check_rows_fit(self, request: Request, spec: ExtractionSpec) -> None:
        """What cannot be divided has to fit in a step: else the request would wait for ever."""
        num_rows = min(spec.num_rows(0, request.num_prompt_tokens), self.chunk_alignment)
        most_layers = self.max_step_cells // max(1, num_rows)
        if len(spec.layer_ids) > most_layers:
            raise ValueError(
                f"layers names {len(spec.layer_ids)} layers, but a step hands out at most "
                f"{most_layers} of {num_rows} tokens: name fewer, or raise "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens}"
            )

    def finish_requests(
        self,
        request_ids: Iterable[str],
        reason: FinishReason,
        stop_reason: int | str | None = None,
        failure: Failure | None = None,
    ) -> None:
        """End requests from outside: aborted, stopped by a string, or failed.

        Their last output comes with the next step. Unknown and ended ids are ignored,
        but an abort also drops what an ended request has not delivered yet.
        """
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.is_finished:
                if reason is FinishReason.ABORT:
                    self._deliveries.drop(request)
            elif reason is FinishReason.STOP and self._must_be_computed_first(request):
                request.pending_stop = stop_reason
            else:
                self._remove_from_queues(request)
                self._end(request, reason, stop_reason, failure=failure)

    def _must_be_computed_first(self, request: Request) -> bool:
        """Whether the connector reads at the end what a preemption took away."""
        is_whole = request.num_finished_tokens >= request.num_tokens - 1
        connector = self.connector
        return not is_whole and connector is not None and not connector.rows_leave_each_step

    def _remove_from_queues(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None,
        output: EngineCoreOutput | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Give a request its final status, and its last output on its way."""
        output = output or EngineCoreOutput(request_id=request.request_id)
        output.end(reason, stop_reason, failure)
        request.status = FINISHED_STATUS[reason]
        request.stop_reason = output.stop_reason
        output.num_cached_tokens = max(request.num_cached_tokens, 0)
        was_scheduled = request.request_id in self._known_to_workers
        if was_scheduled:
            self._known_to_workers.discard(request.request_id)
            self._finished_ids.add(request.request_id)
        self._deliveries.begin(request, output, was_scheduled=was_scheduled)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do: tokens, deliveries, news for workers or users."""
        return bool(self.requests or self._deliveries.outputs or self._finished_ids)

    def num_unfinished_requests(self) -> int:
        """Requests whose last output was not handed out yet."""
        return len(self.requests)

    # ------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput:
        """Plan one step. Its tokens count as computed from here on."""
        step = _Step(self.config.max_num_batched_tokens, self.max_step_cells)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        snapshots = {}
        ending = set()
        for request_id, count in step.num_scheduled.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            planned = self.kv_cache_manager.plan_snapshots(request, start, start + count)
            if planned:
                snapshots[request_id] = planned
            request.num_computed_tokens += count
            is_last_known = request.num_computed_tokens >= request.num_tokens
            if is_last_known and request.max_tokens != 0:
                request.num_tokens_in_flight += 1
            if is_last_known and self._ends_with_what_is_planned(request):
                ending.add(request_id)
        self._num_planned_steps += 1
        output = SchedulerOutput(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=step.cached,
            num_scheduled_tokens=step.num_scheduled,
            total_num_scheduled_tokens=sum(step.num_scheduled.values()),
            finished_req_ids=self._finished_ids,
            preempted_req_ids=step.preempted,
            block_copies=self.kv_cache_manager.end_plan(self._num_planned_steps),
            state_snapshots=snapshots,
            ending_req_ids=ending,
            num_layers_to_run=self._depth(step.num_scheduled),
            step_number=self._num_planned_steps,
        )
        self._finished_ids = set()
        if self.connector is None:
            return output
        try:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        except Exception as error:
            logger.exception("the connector could not plan a step; its requests end with an error")
            self._finished_ids = output.finished_req_ids
            kind = kind_of(error, FailureKind.CONNECTOR_FAILED)
            failure = Failure(kind, f"{type(error).__name__}: {error}")
            self.fail_step(output, FinishReason.ERROR, failure)
            return SchedulerOutput([], CachedRequestData(), {}, 0, set())
        return output

    def _ends_with_what_is_planned(self, request: Request) -> bool:
        if self.connector is not None and not self.connector.rows_leave_each_step:
            return False  # it may read every block of a request that has ended
        num_output_tokens = request.num_output_tokens + request.num_tokens_in_flight
        return request.max_tokens is not None and num_output_tokens >= request.max_tokens

    def _depth(self, request_ids: Iterable[str]) -> int | None:
        depths = [self.requests[request_id].num_layers_to_run for request_id in request_ids]
        known = [depth for depth in depths if depth is not None]
        return max(known) if known and len(known) == len(depths) else None

    def _num_tokens_now(self, request: Request, computed: int, step: _Step) -> int:
        """Tokens of the request to compute in this step; 0 when it has to wait for budget."""
        remaining = request.num_tokens - computed
        if self._goes_on_without_knowing(request):
            remaining += request.num_tokens_in_flight
        count = remaining
        if self.config.long_prefill_token_threshold > 0:
            count = min(count, self.config.long_prefill_token_threshold)
        if request.extraction is not None:
            num_rows = step.cell_budget // len(request.extraction.layer_ids)
            count = min(count, request.extraction.end_of_rows(computed, num_rows) - computed)
        if count > step.token_budget:
            if not self.config.enable_chunked_prefill:
                return 0
            count = step.token_budget
        if count < remaining:
            # Recurrent kernels that work in chunks want chunk boundaries at their multiples.
            aligned_end = (computed + count) // self.chunk_alignment * self.chunk_alignment
            count = max(0, aligned_end - computed)
        return count

    def _goes_on_without_knowing(self, request: Request) -> bool:
        """Whether the worker may feed the token that it is sampling now to the model at once.

        Not when somebody on the host has to see it before: a connector, or the settings of a
        request that look back at its output. This is the one place where a request waits for
        the device. And not when the token is certain to be the last. A stop that nobody
        foresaw costs one token, computed for nothing.
        """
        in_flight = request.num_tokens_in_flight
        if not in_flight or self.connector is not None:
            return False
        if request.sampling_params.looks_back:
            return False
        is_last = request.max_tokens is not None and (
            request.num_output_tokens + in_flight >= request.max_tokens
        )
        return not is_last and request.num_tokens + in_flight < self.max_model_len

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.token_budget > 0:
            request = self.running[index]
            computed = request.num_computed_tokens
            count = self._num_tokens_now(request, computed, step)
            index += 1
            if count == 0:
                continue
            self.kv_cache_manager.release_unneeded(request)
            before = self.kv_cache_manager.block_counts(request.request_id)
            while not self.kv_cache_manager.allocate(request, computed + count):
                victim = self._choose_victim()
                index -= self.running.index(victim) < index
                self._preempt(victim, step)
                if victim is request:
                    return
            self._add_cached(step, request, count, before)

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            # Of equals the last: it ran for the shortest time, and an older one evicting
            # and being evicted in turn would go on forever.
            return max(reversed(self.running), key=lambda r: (r.priority, r.arrival_time))
        return self.running[-1]

    def _preempt(self, request: Request, step: _Step) -> None:
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        if request.request_id in step.num_scheduled:
            step.give_back(request)
            self._remove_cached(step.cached, request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.is_computed_from_forgotten = False
        request.num_captured_tokens = max(request.num_captured_tokens, request.num_computed_tokens)
        request.num_computed_tokens = request.num_finished_tokens = 0
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        step.preempted.add(request.request_id)
        self.waiting.put_back(request)

    @staticmethod
    def _remove_cached(cached: CachedRequestData, request_id: str) -> None:
        index = cached.req_ids.index(request_id)
        for column in (
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
        ):
            del column[index]

    def _add_cached(
        self, step: _Step, request: Request, count: int, before: tuple[int, ...] | None
    ) -> None:
        """Put a request that the workers know into the step; ``before`` None: all its blocks."""
        request_id = request.request_id
        manager = self.kv_cache_manager
        changed = before is None or before != manager.block_counts(request_id)
        step.cached.req_ids.append(request_id)
        step.cached.new_block_ids.append(manager.block_ids(request_id, before) if changed else None)
        step.cached.num_computed_tokens.append(request.num_computed_tokens)
        step.cached.num_output_tokens.append(request.num_output_tokens)
        step.take(request, count)

    def _schedule_waiting(self, step: _Step) -> None:
        manager = self.kv_cache_manager
        while (
            len(self.waiting)
            and step.token_budget > 0
            and len(self.running) < self.config.max_num_seqs
        ):
            request = self.waiting.peek()
            if self._refused == (request.request_id, manager.pool.num_releases):
                break  # nothing was freed since: looking it up again would find the same
            hit = manager.find_prefix(request)
            count = self._try_admit(step, request, hit)
            if not count and hit and not self.running:
                # Alone in the pool: what was found and the rest together may not fit, the
                # request by itself does.
                hit = None
                count = self._try_admit(step, request, None)
            if not count:
                break
            num_hit = hit.num_tokens if hit else 0
            self.waiting.pop()
            self.running.append(request)
            request.num_computed_tokens = request.num_finished_tokens = num_hit
            manager.record_prefix_lookup(request, num_hit)
            self._ask_connector(request)
            self._admit(step, request, count)

    def _try_admit(self, step: _Step, request: Request, hit: PrefixHit | None) -> int:
        """Allocate blocks for a first chunk; its number of tokens, 0 when there is no room."""
        num_hit = hit.num_tokens if hit else 0
        count = self._num_tokens_now(request, num_hit, step)
        if count and not self.kv_cache_manager.allocate(request, num_hit + count, hit):
            self._refused = (request.request_id, self.kv_cache_manager.pool.num_releases)
            return 0
        return count

    def _ask_connector(self, request: Request) -> None:
        """Tell the connector about the blocks; it may only save, not bring tokens in."""
        if self.connector is None:
            return
        num_external, _ = self.connector.get_num_new_matched_tokens(
            request, request.num_computed_tokens
        )
        if num_external:
            logger.warning_once(
                "%s offers KV data to load, which this engine does not do: it computes them",
                type(self.connector).__name__,
            )
        blocks = KVCacheBlocks(self.kv_cache_manager.block_ids(request.request_id))
        self.connector.update_state_after_alloc(request, blocks, 0)

    def _admit(self, step: _Step, request: Request, count: int) -> None:
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
        if request.request_id in self._known_to_workers:
            step.cached.resumed_req_ids.add(request.request_id)
            self._add_cached(step, request, count, None)
            return
        self._known_to_workers.add(request.request_id)
        step.new.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=self.kv_cache_manager.block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                extraction=request.extraction,
            )
        )
        step.take(request, count)

    # ------------------------------------------------------------------ after the step

    def fail_step(self, scheduled: SchedulerOutput, reason: FinishReason, failure: Failure) -> None:
        """A step ended in an exception: end its requests, keep everything else."""
        self.kv_cache_manager.abandon_step(scheduled.step_number)
        self._finished_ids |= scheduled.finished_req_ids  # the workers may not have heard
        self.finish_requests(list(scheduled.num_scheduled_tokens), reason, failure=failure)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in what a step gave: new tokens, ends, deliveries. Returns the news for users."""
        self.kv_cache_manager.finish_step(scheduled.step_number)
        self._totals.num_steps += 1
        connector_output = output.kv_connector_output
        failures = dict(output.failures)
        if connector_output is not None:
            failures |= connector_output.failures
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished:
                continue  # ended while the step was under way
            if request.status is RequestStatus.RUNNING:
                request.num_finished_tokens += count
                self._count_prompt(request)
                self.kv_cache_manager.register(request)
            if request_id not in failures:
                self._take_tokens(request, output)
        if connector_output is not None and self.connector is not None:
            self.connector.update_connector_output(connector_output)
        self._fail_deliveries(failures)
        self._deliveries.take_rows(output.extracted_rows)
        if connector_output is not None:
            self._deliveries.take_saves(connector_output)
            self._count_saves(connector_output.save_stats)
        return EngineCoreOutputs(outputs=self._deliveries.take_outputs())

    def _count_prompt(self, request: Request) -> None:
        """Step by step: a long prompt is work done before its first token is there."""
        done = min(request.num_finished_tokens, request.num_prompt_tokens)
        if done > request.num_counted_tokens:
            self._totals.num_prompt_tokens += done - request.num_counted_tokens
            request.num_counted_tokens = done

    def _take_tokens(self, request: Request, output: ModelRunnerOutput) -> None:
        request_id = request.request_id
        token_ids = output.sampled_token_ids.get(request_id, [])
        prompt_logprobs = output.prompt_logprobs.get(request_id)
        is_prompt_done = request.num_finished_tokens >= request.num_prompt_tokens
        ends_without_tokens = request.max_tokens == 0 and is_prompt_done
        if not token_ids and prompt_logprobs is None and not ends_without_tokens:
            return
        request.append_output_token_ids(token_ids)
        request.num_tokens_in_flight -= len(token_ids)
        self._totals.num_generation_tokens += len(token_ids)
        news = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=token_ids,
            new_logprobs=output.logprobs.get(request_id),
            new_prompt_logprobs=prompt_logprobs,
            num_cached_tokens=max(request.num_cached_tokens, 0),
        )
        reason, stop_reason = why_stop(request, self.max_model_len)
        if reason is None:
            self._deliveries.outputs.append(news)
            return
        self._remove_from_queues(request)
        self._end(request, reason, stop_reason, news)

    def _fail_deliveries(self, failures: Mapping[str, Failure]) -> None:
        """Data that cannot be delivered: their requests end, or ended, with that reason."""
        for request_id, failure in failures.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.is_finished:
                self._deliveries.fail(request, failure)
            else:
                self._remove_from_queues(request)
                self._end(request, FinishReason.ERROR, None, failure=failure)

    def _count_saves(self, saved: SaveStats | None) -> None:
        totals = self._totals
        if saved is not None:
            totals.rows_written, totals.bytes_written = saved.num_rows, saved.num_bytes
            totals.files_written, totals.bytes_in_flight = saved.num_files, saved.bytes_in_flight
            totals.write_seconds = saved.write_seconds

    # ------------------------------------------------------------------ the whole

    def stats(self) -> EngineStats:
        """The state after the last step."""
        manager = self.kv_cache_manager
        queries, hits = manager.prefix_cache_stats
        return msgspec.structs.replace(
            self._totals,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=manager.usage,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what running requests go on to compute is not kept."""
        self.kv_cache_manager.reset_prefix_cache()
        for request in self.running:
            request.is_computed_from_forgotten = True

    def check_integrity(self) -> None:
        """Assert that queues, tables and the pool agree; cheap enough for every test."""
        self.kv_cache_manager.check_integrity()
        running = {request.request_id for request in self.running}
        waiting = {request.request_id for request in self.waiting}
        assert not running & waiting
        self._deliveries.check_integrity(running, waiting)

    def shutdown(self) -> None:
        """Let the connector end what it has begun."""
        if self.connector is not None:
            self.connector.shutdown()
