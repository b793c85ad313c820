"""The engine core in its own process (:mod:`vllm.utils.child_process`).

The parent sends one :class:`CoreSettings`. Commands and reports travel over two zmq sockets in the
folder, which only the user can enter, or of another machine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.config.connectors import REGISTERED, Location
from vllm.exceptions import Failure, FailureError, FailureKind, NotReadyError
from vllm.logger import LogFormat, init_logger, set_log_format
from vllm.model_classes import ModelRegistry
from vllm.transformers_utils.tokenizer import TokenizerLike, load_tokenizer

# Imported before the settings arrive: the parent makes the config in the meantime.
from vllm.utils import pickling
from vllm.utils.child_process import receive_settings
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.utils.mem_utils import return_freed_memory
from vllm.utils.text import error_text, message_of
from vllm.v1.core.kv_cache_utils import describe
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CallAnswer,
    CallWorkers,
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    FinishRequests,
    FreezeRequests,
    ReportEncoder,
    ResetPrefixCache,
    Shutdown,
    TakePart,
    ThawRequests,
    command_address,
    report_address,
)
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.node_links import SocketPlace
from vllm.v1.executor.uniproc_executor import UniProcExecutor

logger = init_logger(__name__)

STOP_POLL_SECONDS = 5.0
REST_AFTER_SECONDS = 5.0
"""Time without requests after which a core gives back the memory of its busiest moment."""


@dataclass(frozen=True)
class CoreSettings:
    """Everything the child needs to know."""

    vllm_config: VllmConfig
    models: dict[str, str]
    """Architectures registered in the parent: name -> "module:Class"."""
    connectors: dict[str, Location]
    """Connectors that are known by name there."""
    log_format: LogFormat
    commands: SocketPlace | None = None
    reports: SocketPlace | None = None
    """Sockets of a front end on another machine. None: those in the folder."""
    mark: str | None = None
    """A file that the front end has made in the folder to which this core writes hidden states."""


class CoreProcess:
    """Takes commands, runs steps while there is something to do, and sends reports."""

    def __init__(self, core: EngineCore, reports: zmq.Socket[bytes]) -> None:
        self.core = core
        self.commands: queue.SimpleQueue[CoreCommand] = queue.SimpleQueue()
        self._reports = reports
        self._encoder = ReportEncoder()
        self._has_warned = False
        self._answers: list[CallAnswer] = []
        """Ends of calls of the workers that were not reported yet."""
        self._texts: dict[str, Detokenizer] = {}
        """Texts of requests that a stop string may end and whose output or rows are taken."""
        core.executor.on_death = partial(self.commands.put, Shutdown())
        self._rest_after_seconds: float | None = REST_AFTER_SECONDS
        """Idle time after which memory is given back; None: it was given back already."""

    def run(self) -> None:
        while True:
            rejected = self._take_commands()
            if rejected is None:
                return
            if self.core.has_unfinished_requests():
                self._begin_wave()
                result = self.core.step()
                self._end_at_stop_strings(result.outputs)
            elif self._takes_part:
                self.core.take_part()
                if not (rejected or self._answers):
                    continue
                result = EngineCoreOutputs()
            elif rejected or self._answers:
                result = EngineCoreOutputs()
            else:
                continue
            self._report(result, rejected)

    @property
    def _takes_part(self) -> bool:
        """True if other engines' steps need this one."""
        return self.core.wave is not None and self.core.wave.is_on

    def _begin_wave(self) -> None:
        """Let the other engines that share experts know that this one has work."""
        number = None if self.core.wave is None else self.core.wave.begin()
        if number is not None:
            self._report(EngineCoreOutputs(), {}, number)

    @cached_property
    def _tokenizer(self) -> TokenizerLike | None:
        return load_tokenizer(self.core.vllm_config.model_config)[0]

    def _add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)
        params = request.sampling_params
        is_taken = bool((params.extra_args or {}).get("kv_transfer_params"))
        is_taken = is_taken and self.core.scheduler.connector is not None
        if params.stop_strings and (is_taken or request.extraction is not None):
            text = Detokenizer.for_request(self._tokenizer, params, request.prompt_token_ids)
            self._texts[request.request_id] = text

    def _end_at_stop_strings(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """End requests at their stop strings, so that nobody gets rows of more than the reply has:
        the front end finds a stop string only when the next tokens have been computed."""
        for output in outputs if self._texts else ():
            text = self._texts.get(output.request_id)
            stop = text.update(output.new_token_ids) if text is not None else None
            if output.finished or stop is not None:
                self._texts.pop(output.request_id, None)
            if stop is not None:
                self.core.finish_requests({output.request_id: stop})

    def _report(
        self, result: EngineCoreOutputs, rejected: dict[str, Failure], wave: int = 0
    ) -> None:
        report = CoreReport(
            outputs=result.outputs,
            rejected=rejected,
            answers=self._answers,
            stats=self.core.stats(),
            wave=wave,
        )
        self._answers = []
        self._reports.send_multipart(self._encoded(report, result), copy=False)

    def _encoded(self, report: CoreReport, result: EngineCoreOutputs) -> list[bytes | memoryview]:
        """Encode a report with the connector's stats and events; without them if that fails."""
        try:
            stats = msgspec.to_builtins(result.kv_connector_stats)
            report.kv_connector_stats = [one["data"] for one in stats]
            report.kv_cache_events = msgspec.to_builtins(result.kv_cache_events)
            return self._encoder.encode(report)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                message = message_of(error)
                logger.warning("stats or events of the KV connector are dropped: %s", message)
            report.kv_connector_stats, report.kv_cache_events = [], []
            return self._encoder.encode(report)

    def _take_commands(self) -> dict[str, Failure] | None:
        """Carry out the commands that have arrived; wait for one when the core is idle.

        Returns the requests that were refused and why; None: the command was to end.
        """
        rejected: dict[str, Failure] = {}
        must_wait = not (self.core.has_unfinished_requests() or self._takes_part)
        while True:
            try:
                command = self.commands.get(block=must_wait, timeout=self._rest_after_seconds)
            except queue.Empty:
                if must_wait:
                    return_freed_memory()
                    self._rest_after_seconds = None
                return rejected
            must_wait = False
            self._rest_after_seconds = REST_AFTER_SECONDS
            if isinstance(command, AddRequest):
                try:
                    self._add_request(command.request)
                except EngineDeadError:
                    return None  # who asked learns of it when this process ends
                except ValueError as error:
                    is_early = isinstance(error, NotReadyError)
                    kind = FailureKind.NOT_READY if is_early else FailureKind.BAD_REQUEST
                    refusal = Failure(kind, message_of(error))
                    rejected[command.request.request_id] = refusal
            elif isinstance(command, AbortRequests):
                self.core.abort_requests(command.request_ids)
                for request_id in command.request_ids:  # its last output may not come any more
                    self._texts.pop(request_id, None)
            elif isinstance(command, FinishRequests):
                self.core.finish_requests(command.stops)
            elif isinstance(command, ResetPrefixCache):
                self.core.reset_prefix_cache(reset_connector=command.reset_connector)
            elif isinstance(command, CallWorkers):
                self._answers.append(self._call_workers(command))
            elif isinstance(command, FreezeRequests):
                result = self.core.freeze(keeps_states=command.keeps_states)
                self._end_at_stop_strings(result.outputs)
                self._answers.append(CallAnswer(command.number, pickle.dumps([])))
                self._report(result, {})
            elif isinstance(command, ThawRequests):
                self.core.thaw()
                self._answers.append(CallAnswer(command.number, pickle.dumps([])))
            elif isinstance(command, TakePart):
                if self.core.wave is not None:
                    self.core.wave.join(command.wave)
            else:
                return None

    def _call_workers(self, command: CallWorkers) -> CallAnswer:
        try:
            results = self.core.collective_rpc(pickle.loads(command.call))
            return CallAnswer(command.number, pickling.dumps(results))
        except FailureError as error:
            return CallAnswer(command.number, failure=error.failure)
        except Exception as error:
            is_refusal = isinstance(error, ValueError)
            kind = FailureKind.BAD_REQUEST if is_refusal else FailureKind.STEP_FAILED
            if not is_refusal:
                logger.exception("a call of the workers failed")
            text = message_of(error) if is_refusal else error_text(error)
            return CallAnswer(command.number, failure=Failure(kind, text))


def _connect(end: zmq.Socket[Any], local_address: str, place: SocketPlace | None) -> None:
    if place is None:
        end.connect(local_address)
    else:
        place.connect(end)


def _watch_ranks(executor: UniProcExecutor, report: Callable[[CoreReport], None]) -> None:
    """Report that a signal has stopped a rank's process, and that it goes on again.

    A step that waits for such a process reports nothing, so this runs in a thread of its own.
    """
    before = False
    while True:
        time.sleep(STOP_POLL_SECONDS)
        if executor.has_stopped_rank != before:
            before = not before
            report(CoreReport(has_stopped_rank=before, stats=EngineStats()))


def _receive_commands(commands: zmq.Socket[bytes], process: CoreProcess) -> None:
    decoder = msgspec.msgpack.Decoder(list[CoreCommand])
    with commands, contextlib.suppress(zmq.ContextTerminated):
        while True:
            for command in decoder.decode(commands.recv()):
                if isinstance(command, Shutdown):  # others of the engine may end before it
                    process.core.executor.is_closing = True
                process.commands.put(command)


def _start_core(settings: CoreSettings) -> tuple[EngineCore | None, CoreStarted]:
    try:
        ModelRegistry.restore(settings.models)
        REGISTERED.update(settings.connectors)
        if settings.mark is not None and not os.path.exists(settings.mark):
            raise ValueError(
                f"shared_storage_path={os.path.dirname(settings.mark)!r} is another folder on "
                f"{socket.gethostname()} than on the front end's machine, so replies would name "
                "files that are not there; use a folder that all machines share"
            )
        core = EngineCore(settings.vllm_config)
    except ValueError as error:
        return None, CoreStarted(failure=Failure(FailureKind.BAD_REQUEST, message_of(error)))
    except Exception as error:
        logger.exception("the engine core could not start")
        return None, CoreStarted(failure=Failure(FailureKind.NOT_STARTED, error_text(error)))
    plan = core.kv_cache_config
    return core, CoreStarted(
        max_model_len=settings.vllm_config.model_config.max_model_len,
        num_blocks=plan.num_blocks,
        block_bytes=plan.block_bytes,
        shares_experts=core.executor.shares_experts,
        pool_description=describe(plan),
    )


def _report_alone(make_reports: Callable[[], zmq.Socket[bytes]], report: CoreReport) -> None:
    """Send a report through a socket of its own: that of the steps belongs to another thread."""
    with make_reports() as reports:
        reports.send_multipart(ReportEncoder().encode(report))


def main(folder: str) -> int:
    settings: CoreSettings = receive_settings(folder)
    set_log_format(settings.log_format)
    context: zmq.Context[Any] = zmq.Context()

    def make_reports() -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        _connect(socket, report_address(folder), settings.reports)
        return socket

    reports, commands = make_reports(), context.socket(zmq.PULL)
    _connect(commands, command_address(folder), settings.commands)
    core, started = _start_core(settings)
    reports.send(msgspec.msgpack.encode(started))
    if core is None:
        context.destroy(linger=5000)
        return 1
    settle_garbage_collector()
    process = CoreProcess(core, reports)
    arguments = (commands, process)
    threading.Thread(target=_receive_commands, args=arguments, name="commands", daemon=True).start()
    watched = (core.executor, partial(_report_alone, make_reports))
    if settings.vllm_config.parallel_config.world_size > 1:
        threading.Thread(target=_watch_ranks, args=watched, name="ranks", daemon=True).start()
    process.run()
    core.shutdown()
    reports.close(linger=5000)
    return 0 if core.executor.dead_because is None else 1
