"""Several engine cores behind one front end (data parallelism).

Each core is a whole engine in its own process and serves its own requests. The group looks like one
core: a request goes to one of them (``core_balancer.py``), everything else to all, and their
reports are combined. When a core ends, its requests fail and the others go on, unless they share
experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from vllm.distributed.engine_group import EngineFiles
from vllm.exceptions import Failure, FailureKind
from vllm.logger import init_logger
from vllm.utils import pickling
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_balancer import BALANCERS
from vllm.v1.engine.core_client import AnyCoreHandle, AsyncCoreClient
from vllm.v1.engine.core_messages import (
    AbortRequests,
    AddRequest,
    AnsweredCommand,
    CallAnswer,
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    FinishRequests,
    ResetPrefixCache,
    Shutdown,
    TakePart,
)
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger(__name__)

SOCKETS_PER_CORE = 8
"""Room for the sockets of a core, and for those that zmq needs itself."""
MOST_THREADS = 4
"""Threads that copy messages, of which those with rows are large."""
GONE = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0, "bytes_in_flight": 0}
"""State of a core that has ended; what it counted stays."""


class CoreGroup:
    """Sends commands to several cores; the methods are those of ``AsyncCoreClient``."""

    def __init__(
        self,
        names: Sequence[str],
        handles: Sequence[AnyCoreHandle],
        on_report: Callable[[CoreReport], None],
        on_death: Callable[[str], None],
        balancing: str = "least-loaded",
        engine_files: EngineFiles | None = None,
    ) -> None:
        """engine_files: the memory of engines that may share experts."""
        self._names, self._on_report, self._on_death = names, on_report, on_death
        self._engine_files = engine_files
        self._background: set[asyncio.Task[None]] = set()
        num_threads = min(len(handles), MOST_THREADS)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context(num_threads)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CORE * len(handles))
        self._clients = [
            AsyncCoreClient(
                handle, partial(self._take_report, i), partial(self._take_death, i), self._context
            )
            for i, handle in enumerate(handles)
        ]
        self._alive = dict.fromkeys(range(len(handles)))
        """Numbers of the cores that have not ended, in order."""
        self._balancer = BALANCERS[balancing]()
        self._core_of: dict[str, int] = {}
        """The core of each unfinished request."""
        self._loads = [0] * len(handles)
        """Number of unfinished requests of each core."""
        self._answers: dict[int, dict[int, CallAnswer | None]] = {}
        """Calls of the workers by number: the answer of each core that was asked; None: not yet."""

    @property
    def stats(self) -> EngineStats:
        """The sum of the counts of all cores; the usage of pools is the mean of those that run."""
        all_stats = [
            client.stats if core in self._alive else msgspec.structs.replace(client.stats, **GONE)
            for core, client in enumerate(self._clients)
        ]
        names = EngineStats.__struct_fields__
        total = {name: sum(getattr(one, name) for one in all_stats) for name in names}
        total["kv_cache_usage"] /= max(1, len(self._alive))
        return EngineStats(**total)

    @property
    def is_stopped(self) -> bool:
        return any(client.is_stopped for client in self._clients)

    async def start(self) -> CoreStarted:
        starts = [asyncio.create_task(client.start()) for client in self._clients]
        try:
            started = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        if not started[0].shares_experts:
            self._engine_files = None
        return CoreStarted(
            max_model_len=min(one.max_model_len for one in started),
            num_blocks=sum(one.num_blocks for one in started),
            block_bytes=started[0].block_bytes,
            pool_description=[line for one in started for line in one.pool_description],
        )

    async def send(self, command: CoreCommand) -> None:
        """Hand a command to the cores that it is for. EngineDeadError: all of them are gone."""
        if isinstance(command, AddRequest):
            await self._add(command)
        elif isinstance(command, AbortRequests):
            for core, request_ids in self._by_core(command.request_ids):
                self._forget(request_ids)
                await self._send_to(core, AbortRequests(request_ids))
        elif isinstance(command, FinishRequests):
            for core, request_ids in self._by_core(command.stops):
                stops = {request_id: command.stops[request_id] for request_id in request_ids}
                await self._send_to(core, FinishRequests(stops))
        else:
            if isinstance(command, AnsweredCommand):
                self._answers[command.number] = dict.fromkeys(self._alive)
            elif isinstance(command, ResetPrefixCache):
                self._balancer.forget()
            for core in list(self._alive):
                await self._send_to(core, command)

    async def _add(self, command: AddRequest) -> None:
        request_id = command.request.request_id
        while self._alive:
            core = self._balancer.choose(command.request, self._alive, self._loads)
            self._core_of[request_id] = core
            self._loads[core] += 1
            try:
                await self._clients[core].send(command)
            except BaseException as error:
                self._forget([request_id])
                if not isinstance(error, EngineDeadError):
                    raise
                self._take_death(core, "an engine core's process has ended")
            else:
                return
        raise EngineDeadError("all engine cores have ended")

    async def _send_to(self, core: int, command: CoreCommand) -> None:
        try:
            await self._clients[core].send(command)
        except EngineDeadError as error:
            self._take_death(core, str(error))
            if not self._alive:
                raise

    def _by_core(self, request_ids: Iterable[str]) -> list[tuple[int, list[str]]]:
        found: dict[int, list[str]] = {}
        for request_id in request_ids:
            core = self._core_of.get(request_id)
            if core is not None:
                found.setdefault(core, []).append(request_id)
        return list(found.items())

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Take in that requests have ended, or never begun."""
        for request_id in request_ids:
            core = self._core_of.pop(request_id, None)
            if core is not None:
                self._loads[core] -= 1

    def _tell_others(self, core: int, command: CoreCommand) -> None:
        """Hand a command to all other cores, without waiting."""

        async def send(other: int) -> None:
            with contextlib.suppress(EngineDeadError):
                await self._clients[other].send(command)

        for other in range(len(self._clients)):
            if other != core:
                task = asyncio.get_running_loop().create_task(send(other))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    def _take_report(self, core: int, report: CoreReport) -> None:
        if report.wave:
            self._tell_others(core, TakePart(report.wave))
        self._forget(output.request_id for output in report.outputs if output.finished)
        self._forget(report.rejected)
        if self._answers:
            for answer in report.answers:
                if answer.number in self._answers:
                    self._answers[answer.number][core] = answer
            report.answers = self._complete_answers()
        self._on_report(report)

    def _complete_answers(self) -> list[CallAnswer]:
        complete = []
        for number, by_core in list(self._answers.items()):
            answers = [answer for answer in by_core.values() if answer is not None]
            if len(answers) == len(by_core):
                del self._answers[number]
                complete.append(_combined(number, answers))
        return complete

    def _take_death(self, core: int, reason: str) -> None:
        """Fail the requests of a core that has ended."""
        if core not in self._alive:
            return
        del self._alive[core]
        reason = f"{self._names[core]}: {reason}"
        if self._engine_files is not None and self._alive:
            self._engine_files.end_group()
            self._tell_others(core, Shutdown())
            self._alive.clear()
            reason += "; it had some of the experts of all engines"
        if not self._alive:
            self._on_death(reason)
            return
        logger.error("%s; its requests fail, the others go on", reason)
        failure = Failure(FailureKind.ENGINE_DEAD, reason)
        request_ids = [one for one, its_core in self._core_of.items() if its_core == core]
        outputs = [EngineCoreOutput(request_id=one) for one in request_ids]
        for output in outputs:
            output.end(FinishReason.ERROR, None, failure)
        self._forget(request_ids)
        for number, by_core in self._answers.items():
            if core in by_core and by_core[core] is None:
                by_core[core] = CallAnswer(number, failure=failure)
        answers = self._complete_answers()
        self._on_report(CoreReport(outputs=outputs, answers=answers, stats=EngineStats()))

    def abandon(self) -> None:
        for client in self._clients:
            client.abandon()
        self._context.destroy(linger=0)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))
        self._context.destroy(linger=0)


def _combined(number: int, answers: Sequence[CallAnswer]) -> CallAnswer:
    """Make one answer of those of all cores: the results one after another, or a failure."""
    for answer in answers:
        if answer.failure is not None:
            return CallAnswer(number, failure=answer.failure)
    results = [result for answer in answers for result in pickle.loads(answer.results)]
    return CallAnswer(number, pickling.dumps(results))
