"""Chooses the requests of the next step, and gives them tokens and blocks.

Continuous batching under one token budget: running requests come first, in order, then
waiting ones. Long prompts run in chunks. When the pool is full, the last request gives
its blocks back and is computed again later. This module never sees a tensor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefix_hash import extend_prefix_hashes
from vllm.v1.core.sched.chunks import ChunkRules
from vllm.v1.core.sched.deliveries import Deliveries
from vllm.v1.core.sched.loads import NOTHING, LoadFailurePolicy, Loads, LostLoad, Offer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler_connector import ConnectorCalls
from vllm.v1.core.sched.step_plan import Start, StepPlan, common_depth
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import FINISHED_STATUS, RUNNING, Ending, Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

logger = init_logger(__name__)


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
        longrope_limit: int | None = None,
        connector: KVConnectorBase_V1 | None = None,
        load_failure_policy: LoadFailurePolicy = "fail",
        timeout_seconds: float | None = None,
    ) -> None:
        self.config = scheduler_config
        self.kv_cache_manager = kv_cache_manager
        if chunk_alignment > scheduler_config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens={scheduler_config.max_num_batched_tokens} is less than "
                f"one chunk of this model's recurrent kernels: use at least {chunk_alignment}"
            )
        self.connector = connector
        self.rules = ChunkRules(
            scheduler_config,
            max_model_len,
            chunk_alignment,
            max_step_cells,
            host_sees_tokens=connector is not None,
            blocks_are_read_at_end=connector is not None and not connector.rows_leave_each_step,
            longrope_limit=longrope_limit,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(scheduler_config.policy)
        self.running: list[Request] = []
        self._finished_ids: set[str] = set()  # not yet told to the workers
        self._unbegun_ids: set[str] = set()  # likewise
        self._known_to_workers: set[str] = set()
        num_groups = len(kv_cache_config.kv_cache_groups)
        self._has_rows = kv_cache_config.hidden_state_group_id() is not None
        self._calls: ConnectorCalls | None = None
        self._loads: Loads | None = None
        if connector is not None:
            self._calls = ConnectorCalls(connector, timeout_seconds)
            self._loads = Loads(
                self._calls, kv_cache_manager, load_failure_policy, has_rows=self._has_rows
            )
        self._deliveries = Deliveries(self.requests, kv_cache_manager, num_groups, self._calls)
        self._restarted: dict[str, int] = {}  # for the workers: tokens by request
        self._totals = EngineStats()
        self._num_planned_steps = 0
        self.is_frozen = False
        """True if no step computes anything, and requests wait in their places."""
        self.starts_again = False
        """True if the next step gives back all that was computed of requests."""
        # The head of the queue that found no room, and the pool's num_releases at that time.
        self._refused: tuple[str, int] | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request.

        ValueError: the id is in use, the connector cannot serve the request, or it asks for more
        rows than a step may hand out.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.extraction is not None:
            request.extraction.checked_positions(request.num_prompt_tokens)
            self.rules.check_rows_fit(request, request.extraction)
        if self.connector is not None:
            extend_prefix_hashes(request, request.num_tokens)
        failure = None if self._calls is None else self._calls.check_request(request)
        self.requests[request.request_id] = request
        if failure is None:
            self.waiting.add(request)
        else:
            self._end(request, FinishReason.ERROR, None, failure=failure)

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
            if request.is_finished():
                if reason is FinishReason.ABORT:
                    self._deliveries.drop(request)
            elif reason is FinishReason.STOP:
                self._stop(request, stop_reason)
            else:
                self._remove_from_queues(request)
                self._end(request, reason, stop_reason, failure=failure)

    def _stop(self, request: Request, stop_reason: int | str | None) -> None:
        """End a request at a stop string, as soon as what is read of it was computed."""
        if request.ending is not None:
            return
        if self._must_be_computed_first(request):
            request.pending_stop = stop_reason
        else:
            self._end_with_rows(request, Ending(FinishReason.STOP, stop_reason, None))

    def _end_with_rows(self, request: Request, ending: Ending) -> None:
        """End a request, after another step if the row of its last token is still to come."""
        request.ending = ending
        if not request.lacks_rows(all_again=self.rules.has_outgrown(request)):
            self._remove_from_queues(request)
            self._end(request, *ending)

    def _must_be_computed_first(self, request: Request) -> bool:
        """Return whether the connector reads, at the end, what a preemption took away."""
        is_whole = request.num_finished_tokens >= request.num_tokens - 1
        connector = self.connector
        return not is_whole and connector is not None and not connector.rows_leave_each_step

    def _remove_from_queues(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.waiting.remove(request)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None,
        output: EngineCoreOutput | None = None,
        failure: Failure | None = None,
        *,
        was_told: bool = False,
    ) -> None:
        """Set a request's final status and send its last output.

        was_told: the connector knows the request, even if it was never scheduled.
        """
        output = output or EngineCoreOutput(request_id=request.request_id)
        output.end(reason, stop_reason, failure)
        request.status = FINISHED_STATUS[reason]
        request.stop_reason = output.stop_reason
        output.num_cached_tokens = max(request.num_cached_tokens, 0)
        output.num_restarts = request.num_restarts
        output.first_scheduled_time = request.first_scheduled_time
        was_scheduled = request.request_id in self._known_to_workers
        if was_scheduled:
            self._known_to_workers.discard(request.request_id)
            self._finished_ids.add(request.request_id)
        else:
            self._unbegun_ids.add(request.request_id)
        is_loading = self._loads is not None and self._loads.forget(request.request_id)
        if self.connector is not None:
            extend_prefix_hashes(request, request.num_tokens)
        was_told = was_told or was_scheduled
        self._deliveries.begin(request, output, was_told=was_told, is_loading=is_loading)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has work to do: tokens, deliveries, reports to workers or users."""
        num_frozen = len(self.running) + len(self.waiting) if self.is_frozen else 0
        if len(self.requests) > num_frozen or self._deliveries.outputs or self._finished_ids:
            return True
        return self._calls is not None and self._calls.has_pending_push_work()

    def num_unfinished_requests(self) -> int:
        """Requests whose last output was not handed out yet."""
        return len(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. Its tokens count as computed from here on."""
        budgets = (self.config.max_num_batched_tokens, self.rules.max_step_cells)
        step = StepPlan(self.kv_cache_manager, *budgets)
        output = step.output
        if self.starts_again:
            self._start_all_again(step)
        if not self.is_frozen:
            self._schedule_running(step)
            if not output.preempted_req_ids:
                self._schedule_waiting(step)
        chunks = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            request.num_computed_tokens = end = start + count
            chunks.append((request, start, end))
            if end >= request.num_tokens:  # no known token is left
                if request.max_tokens != 0:
                    request.num_tokens_in_flight += 1
                if self.rules.ends_with_what_is_planned(request):
                    output.ending_req_ids.add(request_id)
            if request.is_long:
                output.long_req_ids.add(request_id)
        self._num_planned_steps += 1
        output.step_number = self._num_planned_steps
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_layers_to_run = common_depth(request for request, _, _ in chunks)
        output.state_snapshots = self.kv_cache_manager.plan_snapshots(chunks)
        output.block_copies = self.kv_cache_manager.end_plan(output.step_number)
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        output.unbegun_req_ids, self._unbegun_ids = self._unbegun_ids, set()
        output.restarted_req_tokens, self._restarted = self._restarted, {}
        failure = None if self._calls is None else self._calls.plan(output)
        return output if failure is None else self._fail_plan(output, failure)

    def _fail_plan(self, planned: SchedulerOutput, failure: Failure) -> SchedulerOutput:
        """Fail the requests of a step for which the connector could not plan; none of it runs."""
        self._finished_ids = planned.finished_req_ids
        self._unbegun_ids = planned.unbegun_req_ids
        self._restarted = planned.restarted_req_tokens
        assert self._loads is not None
        for request_id in planned.loading_req_ids:  # these loads do not begin now
            self._loads.forget(request_id)
        self._deliveries.fail_lost(planned.finished_req_ids, failure)
        self.fail_step(planned, FinishReason.ERROR, failure)
        self.finish_requests(planned.loading_req_ids, FinishReason.ERROR, failure=failure)
        return SchedulerOutput()

    def _schedule_running(self, step: StepPlan) -> None:
        rules, manager, running, index = self.rules, self.kv_cache_manager, self.running, 0
        has_limit = rules.longrope_limit is not None
        release, has_blocks = manager.release_unneeded, manager.has_blocks
        while index < len(running) and step.token_budget > 0:
            request = running[index]
            if has_limit and rules.has_outgrown(request):
                self._preempt(request, step)
                continue
            computed = request.num_computed_tokens
            count = rules.num_tokens_now(request, computed, step)
            index += 1
            if count == 0:
                continue
            release(request)  # others keep their blocks: a load of theirs may have failed
            new_blocks = None
            if not has_blocks(request.request_id, computed + count):
                before = manager.block_counts(request.request_id)
                while not manager.allocate(request, computed + count):
                    victim = self._choose_victim()
                    is_alone = len(running) == 1
                    if is_alone and computed > request.num_finished_tokens:
                        return  # its step under way has blocks to give back, such as kept states
                    index -= running.index(victim) < index
                    self._preempt(victim, step)
                    if victim is request:
                        return
                new_blocks = manager.block_ids(request.request_id, before)
            step.add_known(request, count, new_blocks)

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            # Of equals the last to arrive, or two requests could evict each other forever.
            return max(self.running, key=lambda r: (r.priority, r.arrival_order))
        return self.running[-1]

    def _preempt(self, request: Request, step: StepPlan) -> None:
        self.running.remove(request)
        self.kv_cache_manager.free(request)
        step.give_back(request)
        request.status = RequestStatus.PREEMPTED
        request.is_computed_from_forgotten = False
        request.num_captured_tokens = max(request.num_captured_tokens, request.num_computed_tokens)
        request.num_computed_tokens = request.num_finished_tokens = 0
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        step.output.preempted_req_ids.add(request.request_id)
        self.waiting.put_back(request)

    def fail_frozen(self, failure: Failure) -> None:
        """End all requests that run or wait."""
        for request in (*self.running, *self.waiting):
            self._fail(request, failure)

    def _start_all_again(self, step: StepPlan) -> None:
        """Give back blocks and rows of all requests, which are computed again from their tokens. A
        request fails if its values have left, because the others would be of other weights."""
        self.starts_again = False
        if self._loads is not None:
            self._loads.lose_all()
            for request in self._loads.under_way.values():
                request.num_restarts += 1
        for request in reversed(self.running[:]):
            self._preempt(request, step)
        for request in self.waiting:
            request.void_steps = self._num_planned_steps
            request.num_restarts += 1
            if self._loads is not None and request.request_id in self._loads.arrived:
                self._loads.forget(request.request_id)
                self.kv_cache_manager.free(request)
            if not request.num_captured_tokens:
                continue
            if self._has_sent_values(request):
                message = "values of it were sent before the pause, and weights may have changed"
                self._fail(request, Failure(FailureKind.NOT_READY, message))
            elif request.request_id in self._known_to_workers:
                self._restarted[request.request_id] = request.num_tokens
                request.num_captured_tokens = 0

    def _has_sent_values(self, request: Request) -> bool:
        """Return whether some rows of a request, or values of its prompt, have left."""
        is_in_prompt = request.num_captured_tokens < request.num_prompt_tokens
        if request.sampling_params.prompt_logprobs is not None and is_in_prompt:
            return True
        sends_rows = self._has_rows and self.connector is not None and self.connector.sends_rows_on
        return sends_rows or (request.extraction is not None and request.extraction.in_parts)

    def _schedule_waiting(self, step: StepPlan) -> None:
        manager = self.kv_cache_manager
        undecided: list[Request] = []
        while (
            len(self.waiting)
            and step.token_budget > 0
            and len(self.running) < self.config.max_num_seqs
        ):
            request = self.waiting.peek()
            if self.rules.has_outgrown(request):
                request.become_long()
                if request.num_captured_tokens:  # rows of the other rotation
                    self._restarted[request.request_id] = request.num_tokens
                    request.num_captured_tokens = 0
            refused = self._refused
            if refused and refused == (request.request_id, manager.pool.num_releases):
                break  # nothing was freed since then: it would not find more
            start = self._find_start(request)
            if start is None:  # the connector will know later, or the request has ended
                if not request.is_finished():
                    undecided.append(self.waiting.pop())
                continue
            if not self._try_start(step, request, start):
                break
        for request in reversed(undecided):
            self.waiting.put_back(request)

    def _find_start(self, request: Request) -> Start | None:
        """Find where a waiting request can begin; None when that is not known now."""
        loads = self._loads
        if loads is not None and request.request_id in loads.arrived:
            return Start(None, NOTHING, request.num_computed_tokens)
        hit = self.kv_cache_manager.find_prefix(request)
        num_hit = hit.num_tokens if hit else 0
        offer: Offer | None = NOTHING
        if loads is not None:
            try:
                offer = loads.ask(request, num_hit)
            except FailureError as error:
                self._fail(request, error.failure)
                return None
        if offer is None:
            return None
        # The last token is computed in any case.
        return Start(hit, offer, min(num_hit + offer.num_tokens, request.num_tokens - 1))

    def _try_start(self, step: StepPlan, request: Request, start: Start) -> bool:
        """Admit a waiting request; False when it has to wait for room."""
        count = self._try_admit(step, request, start)
        is_alone = not self.running and not (self._loads and self._loads.under_way)
        if count is None and is_alone:
            # Alone in the pool: the tokens found and the rest may not fit together, but the
            # request by itself does.
            if start.hit or start.offer.num_tokens:
                start = Start(None, NOTHING, 0)
                count = self._try_admit(step, request, start)
            elif self._give_up_a_load(request):
                count = self._try_admit(step, request, start)
        if count is None:
            return False
        self.waiting.pop()
        request.num_computed_tokens = request.num_finished_tokens = start.num_tokens
        was_found = self._loads is None or request.request_id not in self._loads.arrived
        if was_found and self.kv_cache_manager.enable_caching:
            self._totals.prefix_cache_queries += request.num_tokens
            self._totals.prefix_cache_hits += start.num_found
        if self._tell_connector(step, request, start.offer):
            if start.offer.in_background:
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            else:
                self._admit(step, request, count)
        return True

    def _try_admit(self, step: StepPlan, request: Request, start: Start) -> int | None:
        """Allocate blocks for a first chunk; return its tokens, or None when there is no room.

        A load in the background takes blocks for what it brings, and no tokens.
        """
        count = 0
        if not start.offer.in_background:
            count = self.rules.num_tokens_now(request, start.num_tokens, step)
            if not count:
                return None
        # A connector writes all that it offered, even the last token, which is computed again.
        end = max(start.num_tokens + count, start.num_found + start.offer.num_tokens)
        if self.kv_cache_manager.allocate(request, end, start.hit, start.num_tokens):
            return count
        self._refused = (request.request_id, self.kv_cache_manager.pool.num_releases)
        return None

    def _give_up_a_load(self, request: Request) -> bool:
        """Free the blocks of the last loaded request when only loads fill the pool; it restarts."""
        victim = None if self._loads is None else self._loads.give_up_last(request)
        if victim is not None:
            self.kv_cache_manager.free(victim)
        return victim is not None

    def _tell_connector(self, step: StepPlan, request: Request, offer: Offer) -> bool:
        """Tell the connector about the blocks and the tokens to load; False: it failed."""
        loads, request_id = self._loads, request.request_id
        if loads is None:
            return True
        has_loaded = loads.arrived.pop(request_id, None) is not None
        try:
            loads.tell_blocks(request, offer.num_tokens)
        except FailureError as error:
            self.kv_cache_manager.undo_copies(request_id)
            self._end(request, FinishReason.ERROR, None, failure=error.failure, was_told=True)
            return False
        if offer.num_tokens and not has_loaded:
            step.output.loading_req_ids.add(request_id)
            if offer.in_background:
                loads.begin(request)
        return True

    def _admit(self, step: StepPlan, request: Request, count: int) -> None:
        request.status = RUNNING
        self.running.append(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.first_scheduled_time = request.first_scheduled_time or time.time()
        if request.request_id in self._known_to_workers:
            # All of its blocks are new.
            step.output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
            step.add_known(request, count, self.kv_cache_manager.block_ids(request.request_id))
            return
        self._known_to_workers.add(request.request_id)
        step.add_new(request, count)

    def fail_step(self, scheduled: SchedulerOutput, reason: FinishReason, failure: Failure) -> None:
        """End the requests of a step that raised an exception; keep everything else."""
        self.kv_cache_manager.abandon_step(scheduled.step_number)
        self._finished_ids |= scheduled.finished_req_ids  # the workers may not have heard
        self._unbegun_ids |= scheduled.unbegun_req_ids
        self.finish_requests(list(scheduled.num_scheduled_tokens), reason, failure=failure)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in a step's results: tokens, ends, deliveries. Returns the outputs for users."""
        connector_output, failures = output.kv_connector_output, dict(output.failures)
        if connector_output is not None:
            self._drop_lost_loads(scheduled, connector_output)
            failures |= connector_output.failures
        self.kv_cache_manager.finish_step(scheduled.step_number)
        self._totals.num_steps += 1
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue  # ended while the step was under way
            if scheduled.step_number <= request.void_steps:
                failures.pop(request_id, None)  # its values are computed again
                continue
            if request.status is RUNNING:
                request.num_finished_tokens += count
                self._totals.num_prompt_tokens += request.count_prompt()
                self.kv_cache_manager.register(request)
            if request_id not in failures:
                self._take_tokens(request, output)
        self._fail_deliveries(failures)
        self._deliveries.take_parts(output.parts_of_rows, self.requests, scheduled.step_number)
        self._deliveries.take_rows(output.extracted_rows)
        if connector_output is not None:
            self._take_connector_output(connector_output)
        outputs = EngineCoreOutputs(self._deliveries.take_outputs())
        return outputs if self._calls is None else self._calls.put_news_into(outputs)

    def _take_connector_output(self, report: KVConnectorOutput) -> None:
        for request_id in report.finished_recving:
            self._deliveries.take_load(request_id)
            self._finish_load(request_id)
        self._deliveries.take_saves(report)
        if (saved := report.save_stats) is not None:
            totals = self._totals
            totals.rows_written, totals.bytes_written = saved.num_rows, saved.num_bytes
            totals.files_written, totals.bytes_in_flight = saved.num_files, saved.bytes_in_flight
            totals.write_seconds = saved.write_seconds
        self._deliveries.fail_overdue()
        for request, failure in self._loads.overdue() if self._loads is not None else ():
            self._fail(request, failure)
        if self._calls is not None:
            self._calls.take_report(report)

    def _drop_lost_loads(self, scheduled: SchedulerOutput, report: KVConnectorOutput) -> None:
        """Fail or recompute the requests for which a connector could not load."""
        if self._loads is None or not (report.invalid_block_ids or report.load_error):
            return
        lost = self._loads.take_lost(report, scheduled.loading_req_ids, self.running)
        for request_id in sorted(lost):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._start_again(request, lost[request_id])

    def _finish_load(self, request_id: str) -> None:
        """End a background load: its request continues from it, or computes the tokens."""
        finished = self._loads.finish(request_id) if self._loads is not None else None
        if finished is None:
            return
        request, is_whole = finished
        if not is_whole:
            self._start_again(request, LostLoad())
            return
        request.status = RequestStatus.WAITING
        self._refused = None
        self.waiting.put_back(request)

    def _start_again(self, request: Request, lost: LostLoad) -> None:
        """Compute a request from its beginning, without what a connector failed to bring."""
        assert self._loads is not None
        self._loads.forget(request.request_id)
        request.void_steps = self._num_planned_steps
        self.kv_cache_manager.forget_request(request.request_id)
        failure = self._loads.why_not_again(request, lost)
        if failure is not None:
            self._fail(request, failure)
            return
        logger.warning("request %s is computed instead: %s", request.request_id, lost.reason)
        if request.request_id in self._known_to_workers:
            self._restarted[request.request_id] = request.num_tokens
        self._remove_from_queues(request)
        self.kv_cache_manager.free(request)
        request.start_again()
        self.waiting.put_back(request)

    def _fail(self, request: Request, failure: Failure) -> None:
        self._remove_from_queues(request)
        self._end(request, FinishReason.ERROR, None, failure=failure)

    def _take_tokens(self, request: Request, output: ModelRunnerOutput) -> None:
        request_id = request.request_id
        token_ids = output.sampled_token_ids.get(request_id, [])
        if request.ending is not None:  # the tokens are too many
            request.num_tokens_in_flight -= len(token_ids)
            self._end_with_rows(request, request.ending)
            return
        prompt_logprobs = output.prompt_logprobs.get(request_id)
        is_prompt_done = request.num_finished_tokens >= request.num_prompt_tokens
        ends_without_tokens = request.max_tokens == 0 and is_prompt_done
        if not token_ids and prompt_logprobs is None and not ends_without_tokens:
            return
        request.append_output_token_ids(token_ids)
        request.num_tokens_in_flight -= len(token_ids)
        self._totals.num_generation_tokens += len(token_ids)
        new_output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=token_ids,
            new_logprobs=output.logprobs.get(request_id),
            new_prompt_logprobs=prompt_logprobs,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            first_scheduled_time=request.first_scheduled_time,
        )
        reason, stop_reason = self.rules.why_stop(request)
        if reason is None:
            self._deliveries.outputs.append(new_output)
            return
        self._end_with_rows(request, Ending(reason, stop_reason, new_output))

    def _fail_deliveries(self, failures: Mapping[str, Failure]) -> None:
        """Fail the requests, running or ended, whose data cannot be delivered."""
        for request_id, failure in failures.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.is_finished():
                self._deliveries.fail(request, failure)
            else:
                self._fail(request, failure)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._totals,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
        )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; what running requests compute later is not kept.

        reset_connector: let the connector forget, too. Returns False if it could not, or if
        there is none.
        """
        self.kv_cache_manager.reset_prefix_cache()
        for request in self.running:
            request.is_computed_from_forgotten = True
        if not reset_connector:
            return True
        return self._calls is not None and self._calls.reset_cache()

    def check_integrity(self) -> None:
        """Assert that queues, tables and the pool agree; cheap enough for every test."""
        self.kv_cache_manager.check_integrity()
        running = {request.request_id for request in self.running}
        waiting = {request.request_id for request in self.waiting}
        loading = self._loads.holders if self._loads is not None else set()
        under_way = loading - waiting
        assert not running & (waiting | loading)
        assert all(
            self.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS
            for request_id in under_way
        )
        self._deliveries.check_integrity(running | waiting | loading, running | loading)

    def shutdown(self) -> None:
        """Let the connector end what it has begun."""
        if self._calls is not None:
            self._calls.shutdown()
