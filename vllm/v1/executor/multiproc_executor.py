"""The executor of several ranks: one in the engine core's process, the others in their own.

All ranks do the same calls in the same order, each with its slice of the model: of every layer
(tensor parallelism), or of some layers (a pipeline stage). The engine's process has the first rank
of the last stage, which alone keeps rows and samples tokens. So nothing but calls, tensors inside a
pass, and what connectors have to report travels between the processes.

With stages, a step's own pass runs only when its result is asked for. Until then the engine may
plan the next step, which the first stages begin meanwhile.

A rank that fails in a call leaves the group, which ends the call for all others; then all meet in a
new group, and the next call begins. If a process ends or does not answer, the engine is dead
(:attr:`UniProcExecutor.dead_because`).
"""

from __future__ import annotations

import copy
import pickle
import platform
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import zmq

from vllm.config.connectors import REGISTERED
from vllm.distributed.communicators import GroupClosedError
from vllm.distributed.engine_group import get_engine_group
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.rank_share import is_on_all_ranks
from vllm.distributed.parallel_state import ALONE, use_groups
from vllm.distributed.pipeline_links import NO_LINKS
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.logger import init_logger, log_format
from vllm.model_classes import ModelRegistry
from vllm.ops.ranks import meet_ranks
from vllm.utils import pickling
from vllm.utils.text import brief
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.executor.gloo_wiring import GlooWiring
from vllm.v1.executor.nodes import Nodes
from vllm.v1.executor.rank_clients import Caller, RankClient, RankDiedError, RanksHere
from vllm.v1.executor.rank_messages import (
    RankAnswer,
    RankCall,
    RankNote,
    RankSettings,
    raise_first_failure,
)
from vllm.v1.executor.rank_terms import differences, terms_of
from vllm.v1.executor.rank_wiring import Wiring
from vllm.v1.executor.ray_ranks import BACKEND, RayRanks
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput, PendingOutput
from vllm.v1.worker.pipeline import pool_share

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.lora.request import LoRARequest

logger = init_logger(__name__)

END_SECONDS = 5.0
"""Time that a process has to end before it is killed."""


@dataclass(eq=False)
class _WaitingStep:
    """A step that other stages were told of."""

    number: int
    scheduled: SchedulerOutput
    group: int
    """Number of the group for which it was planned."""
    outcome: PendingOutput | Exception | None = None
    """The result of it in this process; None: it still waits."""
    report: KVConnectorOutput | None = None
    """The connectors' report of it, if it failed here."""


class MultiprocExecutor(UniProcExecutor):
    """Calls the workers of all ranks."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._context: zmq.Context[Any] = zmq.Context()
        parallel = vllm_config.parallel_config
        parallel = vllm_config.parallel_config = replace(parallel, rank=parallel.driver_rank)
        vllm_config.model_config.stage_of(parallel)  # raises before processes start
        self._has_stages = parallel.pipeline_parallel_size > 1
        self._waiting: deque[_WaitingStep] = deque()
        self._unread: deque[_WaitingStep] = deque()
        """Steps whose results the engine has not asked for."""
        self._notes: list[RankNote] = []
        self._shares_connector = is_on_all_ranks(vllm_config)
        self._aggregator = KVOutputAggregator(1)
        self._reports: list[KVConnectorOutput] = []
        """Reports that the scheduler has yet to hear. If a step fails when it is started, they come
        with the next one."""
        self._group, self._links = ALONE, NO_LINKS
        self._num_calls = self._num_groups = 0
        self._was_interrupted = False  # what made the ranks form their last group
        self._others: list[RankClient] = []
        self._callers: list[Caller] = []
        """The ways to all of them."""
        self._elsewhere: Nodes | RayRanks | None = None
        self._death, self._is_ending = threading.Lock(), False
        if (engines := get_engine_group()) is not None:
            engines.is_engine_alive = self._are_others_alive
        try:
            self._start_others()
            self._meet()
            self._check_terms()
            with self._together("load_model") as given_up:
                super().__init__(vllm_config)
            self._agree_on_way([self._num_ways_given_up, *given_up])
        except RankDiedError as death:
            self._end_others()
            raise FailureError(Failure(FailureKind.ENGINE_DEAD, str(death))) from death
        except BaseException:
            self._end_others()
            raise

    def _check_terms(self) -> None:
        """Raise ValueError if ranks that Ray started have other versions or checkpoints."""
        if self._config.parallel_config.uses_ray:
            with self._together("terms") as others:
                own = terms_of(self._config)
            ranks = [self._config.parallel_config.rank, *(one.rank for one in self._others)]
            names = [f"rank {rank}" for rank in ranks]
            if different := differences([own, *others], names):
                raise ValueError(f"{BACKEND}: the ranks of one engine differ: {different}")

    def _agree_on_way(self, given_up: list[int]) -> None:
        """Let all stages run requests in the way that the last of them came to."""
        while len(set(given_up)) > 1:
            with self._together("give_up_ways", max(given_up)) as others:
                own = self.worker.give_up_ways(max(given_up))
            given_up = [own, *others]

    def _start_others(self) -> None:
        """Start the other processes, with memory that all ranks share."""
        parallel = self._config.parallel_config
        if not (meet_ranks.is_overridden("cpu") or platform.machine() in ("x86_64", "AMD64")):
            raise ValueError(
                f"{parallel.sizes_in_words(', ')}: on {platform.machine()} ranks need this "
                "package's compiled kernels; use 1"
            )
        wiring: Wiring | GlooWiring
        if parallel.nnodes > 1 or parallel.uses_ray:
            kind = RayRanks if parallel.uses_ray else Nodes
            self._elsewhere = kind(self._config)
            distant = self._elsewhere.make_ranks(self._context)
            self._others += distant
            self._callers += distant
            wiring, parallel = self._elsewhere.wiring, self._config.parallel_config
        else:
            wiring = Wiring.make(parallel)
        try:
            self._connections = wiring.open(parallel)
            if here := [rank for rank in parallel.ranks_here if rank != parallel.rank]:
                self._start_here(here, wiring)
        finally:
            wiring.close()
        for other in self._others:
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()

    def _start_here(self, ranks: list[int], wiring: Wiring | GlooWiring) -> None:
        parallel = self._config.parallel_config
        seconds = parallel.distributed_timeout_seconds
        here = RanksHere(self._context, ranks, seconds, wiring.files)
        self._callers.append(here)
        self._others = sorted([*self._others, *here.processes], key=lambda other: other.rank)
        for process, place in zip(here.processes, here.places, strict=True):
            config = copy.copy(self._config)
            config.parallel_config = replace(parallel, rank=process.rank)
            models, connectors = ModelRegistry.snapshot(), dict(REGISTERED)
            process.send(RankSettings(config, wiring, models, connectors, log_format(), place))

    def determine_available_memory(self) -> int:
        with self._together("determine_available_memory") as others:
            own = super().determine_available_memory()
        least: int = min(own, *others)
        if not self._has_stages:
            return least
        layout = plan_layout(self.get_kv_cache_spec(), self._config.cache_config)
        return int(least / pool_share(self._config, layout))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with self._together("initialize_from_config", kv_cache_config):
            super().initialize_from_config(kv_cache_config)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        for one in (call.method, *call.args, *call.kwargs.values()):
            if isinstance(one, FunctionType | type) and one.__module__ == "__main__":
                raise ValueError(
                    f"collective_rpc: {brief(one)} is defined in the program that was started, "
                    "which other ranks cannot import; define it in a module"
                )
        with self._together("collective_rpc", call) as others:
            own = super().collective_rpc(call)
        return [*own, *others]

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        if self.dead_because is not None and not scheduled.total_num_scheduled_tokens:
            return PendingOutput(ModelRunnerOutput(), [])
        told = scheduled
        if not self._shares_connector:
            told = replace(scheduled, kv_connector_metadata=None)
        group = self._num_groups
        if self._unread and scheduled.total_num_scheduled_tokens:
            # It was planned without knowledge of failures since the first of these was.
            group = self._unread[0].group
        number = self._call("execute_model", told, group)
        if not self._has_stages:
            return self._execute(number, scheduled)
        step = _WaitingStep(number, scheduled, group)
        self._waiting.append(step)
        self._unread.append(step)
        return PendingOutput(ModelRunnerOutput(), [partial(self._read_waiting, step)])

    def _execute(self, number: int, scheduled: SchedulerOutput) -> PendingOutput:
        try:
            with self._regroups(number), self.groups():
                pending = super().execute_model(scheduled)
        except BaseException:
            self._keep_reports(number)
            raise
        return pending._replace(parts=[partial(self._confirm, number), *pending.parts])

    def _read_waiting(self, step: _WaitingStep, output: ModelRunnerOutput) -> None:
        self._unread.remove(step)
        self._run_waiting(step)
        assert step.outcome is not None
        if isinstance(step.outcome, BaseException):
            output.kv_connector_output = step.report
            raise step.outcome
        output.kv_connector_output = step.outcome.output.kv_connector_output
        for read in step.outcome.parts:
            read(output)

    @property
    def has_stopped_rank(self) -> bool:  # type: ignore[override]
        stopped = [other for other in self._others if other.is_stopped]  # the log names each
        return bool(stopped)

    def take_part(self) -> None:
        with self._together("take_part"):
            super().take_part()

    def groups(self) -> AbstractContextManager[None]:
        return use_groups(self._group, self._links)

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        if self._shares_connector:
            count = self._config.parallel_config.world_size
            self._aggregator = KVOutputAggregator.from_connector(connector, count)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        with self._together("get_kv_connector_handshake_metadata") as others:
            own = self.worker.model_runner.handshake_metadata()
        parallel = self._config.parallel_config
        ranks = [parallel.rank, *(other.rank for other in self._others)]
        return {
            divmod(rank, parallel.ranks_per_stage): metadata
            for rank, metadata in sorted(zip(ranks, (own, *others), strict=True))
            if metadata is not None
        }

    def run_waiting_steps(self) -> None:
        self._run_waiting()

    def _run_waiting(self, last: _WaitingStep | None = None) -> None:
        """Run this process's part of the steps that wait, up to ``last``; None: all of them."""
        while self._waiting and (last is None or last.outcome is None):
            step = self._waiting.popleft()
            try:
                if step.group != self._num_groups:
                    # The other stages gave it up, because a step before it failed.
                    with self.groups():
                        report = self.worker.model_runner.skip_step(step.scheduled)
                    self._answers(step.number)
                    self._keep_reports(step.number, report)
                    raise FailureError(self._why_given_up())
                step.outcome = self._execute(step.number, step.scheduled)
            except Exception as error:
                if isinstance(error, RankDiedError):
                    self.die(str(error))
                    error = FailureError(Failure(FailureKind.ENGINE_DEAD, str(error)))
                step.outcome, step.report = error, self._merge_reports()

    def _why_given_up(self) -> Failure:
        if self._was_interrupted:
            return Failure(FailureKind.ABORTED, "the step before this one was interrupted")
        return Failure(FailureKind.STEP_FAILED, "the step before this one failed")

    def choose_adapter(self, request_id: str, lora_request: LoRARequest) -> str:
        adapters = self.worker.model_runner.adapters
        if not adapters.has(lora_request):  # and so no rank has it
            with self._together("load_adapter", lora_request):
                adapters.load(lora_request)
        self._notes.append(RankNote("choose_adapter", (request_id, lora_request)))
        return adapters.choose(request_id, lora_request)

    def drop_adapter(self, request_id: str) -> None:
        self._notes.append(RankNote("drop_adapter", (request_id,)))
        super().drop_adapter(request_id)

    def shutdown(self) -> None:
        super().shutdown()
        self._end_others()

    # ---- calls of all ranks

    @contextmanager
    def _together(self, method: str, *args: Any) -> Iterator[list[Any]]:
        """Let the others do what the block does here; the list has their results at its end."""
        results: list[Any] = []
        self._run_waiting()
        number = self._call(method, *args)
        with self._regroups(number):
            with self.groups():
                yield results
            results += self._results(number)

    def _call(self, method: str, *args: Any) -> int:
        self._num_calls = number = self._num_calls + 1
        try:
            packed = pickling.dumps(args)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{method}: other ranks cannot be told: {error}; pass what can be pickled, such as "
                "a folder or a dict of tensors"
            ) from error
        message = pickle.dumps(RankCall(number, method, packed, self._notes))
        self._notes = []
        if method == "execute_model" and not all(one.has_room(message) for one in self._callers):
            # The others take it only after steps in which they wait for this process.
            self._run_waiting()
        if self.dead_because is not None:
            raise FailureError(Failure(FailureKind.ENGINE_DEAD, self.dead_because))
        try:
            for caller in self._callers:
                caller.call(message)
        except RankDiedError as death:
            self.die(str(death))
            raise FailureError(Failure(FailureKind.ENGINE_DEAD, str(death))) from death
        except BaseException:  # an interrupt, which may leave half of the message
            self.die("a call of the ranks was interrupted")
            raise
        return number

    def _results(self, number: int) -> Sequence[Any]:
        """Wait for the others to end a call. FailureError: one of them failed by itself."""
        answers = self._answers(number)
        self._raise_first_failure(answers)
        return [answer.result for answer in answers]

    def _answers(self, number: int) -> list[RankAnswer]:
        """Wait for the others' answers to a call. RankDiedError: one of them does not come."""
        return [other.answer(number, self._others) for other in self._others]

    def _confirm(self, number: int, output: ModelRunnerOutput) -> None:
        """Wait for the others to end a step, and add their connectors' reports to the driver's."""
        try:
            with self._regroups(number):
                self._results(number)
        finally:
            self._keep_reports(number, output.kv_connector_output)
            output.kv_connector_output = self._merge_reports()

    def _merge_reports(self) -> KVConnectorOutput | None:
        reports, self._reports = self._reports, []
        try:
            return self._aggregator.merge(reports)
        except Exception:
            logger.exception("stats, metadata or events of the ranks' connectors are dropped")
            own: dict[str, Any] = dict.fromkeys(
                ("kv_connector_stats", "kv_cache_events", "kv_connector_worker_meta")
            )
            return self._aggregator.merge([replace(report, **own) for report in reports])

    def _keep_reports(self, number: int, own: KVConnectorOutput | None = None) -> None:
        """Take in the reports of a step: the driver's, and those in the answers that have come."""
        if own is not None:
            self._reports.append(own)
        for other in self._others:
            self._reports += other.take_reports(number)

    @contextmanager
    def _regroups(self, number: int) -> Iterator[None]:
        """Bring all ranks together again when the block fails, and raise what failed first."""
        try:
            yield
        except BaseException as error:
            self._was_interrupted = not isinstance(error, Exception)
            try:
                answers = self._meet(number)
            except RankDiedError as death:
                self.die(str(death))
                raise FailureError(Failure(FailureKind.ENGINE_DEAD, str(death))) from error
            if isinstance(error, GroupClosedError):  # the others have the reason
                self._raise_first_failure(answers)
            raise

    def _raise_first_failure(self, answers: Sequence[RankAnswer]) -> None:
        raise_first_failure(zip((other.rank for other in self._others), answers, strict=True))

    def _meet(self, number: int | None = None) -> list[RankAnswer]:
        """Form a new group; returns what the others answered to call ``number`` before that.

        RankDiedError: one of them cannot come.
        """
        if self._group.communicator is not None:
            self._group.communicator.close()
        self._links.close()
        answers = [] if number is None else self._answers(number)
        self._num_groups += 1
        joined = self._call("join", self._num_groups)
        try:  # before the answers, because over TCP they come when all are there
            self._group, self._links = self._connections.join(
                self._num_groups, self._are_others_alive
            )
        except GroupClosedError as late:
            raise RankDiedError(str(late)) from late
        for other in self._others:
            other.answer(joined, self._others)
        return answers

    def _are_others_alive(self) -> bool:
        return all(other.ending is None for other in self._others)

    def _watch(self, other: RankClient) -> None:
        """Take in the end of a process also while nothing is computed."""
        other.wait_for_end()
        if not self._is_ending:
            self.die(str(other.ending))

    def _end_others(self) -> None:
        self._is_ending = True
        for caller in self._callers:
            caller.dismiss()
        grace_seconds = 0.0 if self.dead_because else END_SECONDS
        for other in self._others:
            other.end(grace_seconds)
        if self._elsewhere is not None:
            self._elsewhere.end(grace_seconds)
        self._others, self._callers = [], []
        self._context.destroy(linger=0)
