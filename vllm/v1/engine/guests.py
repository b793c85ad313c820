"""Front ends in other processes that share the engine cores of one ``AsyncLLM``.

Such a *guest* is an ``AsyncLLM`` of its own, which tokenises, checks and makes texts. To it, the
host looks like one engine core: it sends commands and gets reports over two sockets in a folder
(``GuestHandle`` is its side). The host alone talks to the cores. So the choice of an engine,
pauses and calls of workers are in one place, and know the requests of all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from vllm.exceptions import Failure, FailureKind
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_client import HandleOfFolder
from vllm.v1.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    FinishRequests,
    ReportEncoder,
    Shutdown,
    command_address,
    report_address,
)
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger(__name__)


class GuestHost(Protocol):
    """The engine that has guests: the part of ``AsyncLLM`` that they need."""

    started: CoreStarted
    on_guest_file: list[Callable[[str], object]]

    @property
    def may_begin(self) -> bool: ...
    async def wait_until_may_begin(self) -> None: ...
    async def send(self, command: CoreCommand) -> None: ...


class GuestHandle(HandleOfFolder):
    """The host, as a guest sees it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._has_ended = threading.Event()
        self._reason = ""

    @property
    def is_alive(self) -> bool:
        return not self._has_ended.is_set()

    def take_end(self, reason: str) -> None:
        """Take in that the engine has ended."""
        self._reason = reason
        self._has_ended.set()

    def wait_for_end(self) -> str:
        self._has_ended.wait()
        return self._reason

    def make_stop_watch(self) -> Callable[[], bool]:
        """Return what says no: the host watches the cores."""
        return lambda: False

    def end(self, grace_seconds: float = 0.0) -> None:
        """Do nothing: the host's end does not depend on its guests."""


class _Guest:
    """One guest, seen from the host."""

    def __init__(self, context: zmq.asyncio.Context, folder: str) -> None:
        self.commands = context.socket(zmq.PULL)
        self.commands.connect(command_address(folder))
        self._reports: zmq.Socket[bytes] = zmq.Socket.shadow(socket := context.socket(zmq.PUSH))
        self._reports_socket = socket  # the shadow does not keep it alive
        socket.set_hwm(0)  # a report that was dropped would leave its request waiting for ever
        socket.connect(report_address(folder))
        self._encoder = ReportEncoder()
        self.request_ids: set[str] = set()
        """Its unfinished requests that a core has."""
        self.waiting: dict[str, asyncio.Task[None]] = {}
        """Its requests that wait for the end of a pause."""
        self.receiver: asyncio.Task[None] | None = None

    def send_first(self, message: bytes) -> None:
        self._reports.send(message)

    def report(
        self, outputs: list[EngineCoreOutput], rejected: dict[str, Failure] | None = None
    ) -> None:
        """Send results."""
        report = CoreReport(outputs=outputs, rejected=rejected or {}, stats=EngineStats())
        self._reports.send_multipart(self._encoder.encode(report), copy=False)

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.cancel()
        for task in self.waiting.values():
            task.cancel()
        self.commands.close(linger=0)
        self._reports_socket.close(linger=0)


class Guests:
    """The guests of an engine that has started."""

    def __init__(self, engine: GuestHost) -> None:
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._guests: dict[str, _Guest] = {}
        """By folder."""
        self._guest_of: dict[str, _Guest] = {}
        """The guest of each unfinished request that a core has."""

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that a core has."""
        return len(self._guest_of)

    def connect(self, folder: str) -> None:
        """Serve the guest whose sockets are, or will be, in a folder."""
        guest = self._guests[folder] = _Guest(self._context, folder)
        guest.send_first(msgspec.msgpack.encode(self._engine.started))
        guest.receiver = asyncio.get_running_loop().create_task(self._receive(guest))

    async def drop(self, folder: str) -> None:
        """Abort the requests of a guest that has gone."""
        guest = self._guests.pop(folder, None)
        if guest is not None:
            guest.close()
            await self._abort(guest, list(guest.request_ids))

    async def abort_all(self) -> None:
        """Abort the requests that cores have; guests get their ends."""
        for guest in self._guests.values():
            request_ids = list(guest.request_ids)
            await self._abort(guest, request_ids)
            guest.report(
                [
                    EngineCoreOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
                    for request_id in request_ids
                ]
            )

    def take(self, report: CoreReport) -> CoreReport:
        """Hand the results of guests on; returns the rest of the report."""
        if not self._guest_of:
            return report
        outputs: dict[_Guest | None, list[EngineCoreOutput]] = {None: []}
        rejected: dict[_Guest | None, dict[str, Failure]] = {None: {}}
        for output in report.outputs:
            outputs.setdefault(self._guest_of.get(output.request_id), []).append(output)
        for request_id, failure in report.rejected.items():
            owner = self._guest_of.get(request_id)
            rejected.setdefault(owner, {})[request_id] = failure
        self._forget(output.request_id for output in report.outputs if output.finished)
        self._forget(report.rejected)
        report.outputs, report.rejected = outputs.pop(None), rejected.pop(None)
        for guest in {**outputs, **rejected}:
            assert guest is not None
            self._note_files(outputs.get(guest, ()))
            guest.report(outputs.get(guest, []), rejected.get(guest))
        return report

    def _note_files(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            path = (output.kv_transfer_params or {}).get("hidden_states_path")
            if isinstance(path, str):
                for listener in self._engine.on_guest_file:
                    listener(path)

    def close(self) -> None:
        for guest in self._guests.values():
            guest.close()
        self._context.destroy(linger=0)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            guest = self._guest_of.pop(request_id, None)
            if guest is not None:
                guest.request_ids.discard(request_id)

    async def _receive(self, guest: _Guest) -> None:
        decoder = msgspec.msgpack.Decoder(list[CoreCommand])
        while True:
            for command in decoder.decode(await guest.commands.recv()):
                if isinstance(command, AddRequest):
                    await self._take_request(guest, command)
                elif isinstance(command, AbortRequests):
                    await self._abort(guest, command.request_ids)
                elif isinstance(command, FinishRequests):
                    await self._send(command)
                else:
                    assert isinstance(command, Shutdown), command
                    await self._abort(guest, list(guest.request_ids))

    async def _take_request(self, guest: _Guest, command: AddRequest) -> None:
        request_id = command.request.request_id
        if request_id in self._guest_of:
            failure = Failure(FailureKind.BAD_REQUEST, f"a request has the id {request_id}; repeat")
            guest.report([], {request_id: failure})
        elif self._engine.may_begin:
            await self._add(guest, command)
        else:
            adding = asyncio.get_running_loop().create_task(self._add_later(guest, command))
            guest.waiting[request_id] = adding

    async def _add_later(self, guest: _Guest, command: AddRequest) -> None:
        await self._engine.wait_until_may_begin()
        del guest.waiting[command.request.request_id]
        await self._add(guest, command)

    async def _add(self, guest: _Guest, command: AddRequest) -> None:
        request_id = command.request.request_id
        guest.request_ids.add(request_id)
        self._guest_of[request_id] = guest
        await self._send(command)

    async def _abort(self, guest: _Guest, request_ids: list[str]) -> None:
        for request_id in request_ids:
            waiting = guest.waiting.pop(request_id, None)
            if waiting is not None:
                waiting.cancel()
        self._forget(request_ids)
        if request_ids:
            await self._send(AbortRequests(request_ids))

    async def _send(self, command: CoreCommand) -> None:
        """Send a command. If all cores have ended, the guests hear of it from the server."""
        with contextlib.suppress(EngineDeadError):
            await self._engine.send(command)
