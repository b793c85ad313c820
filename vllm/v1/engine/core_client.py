"""The front end's side of the connection to an engine core in another process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from vllm.exceptions import FailureKind
from vllm.logger import init_logger, log_format
from vllm.utils.async_utils import call_in_thread
from vllm.utils.child_process import ChildProcess, private_folder, with_last_lines
from vllm.utils.stop_watch import StopWatch
from vllm.v1.engine.core_messages import (
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    ReportDecoder,
    Shutdown,
    command_address,
    joined,
    report_address,
)
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

SHUTDOWN_SECONDS = 10.0
"""Time that a core has to complete its files before it is killed."""
START_POLL_MILLISECONDS = 100
STOP_POLL_SECONDS = 5.0
MOST_REPORTS_AT_ONCE = 16
"""Reports of one core after which others, and requests, have their turn."""


class AnyCoreHandle(ABC):
    """The process of an engine core, on this machine or on another."""

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def wait_for_end(self) -> str:
        """Wait until the process has ended; returns a sentence about how."""

    @abstractmethod
    def bind(self, commands: zmq.Socket[Any], reports: zmq.Socket[Any]) -> None:
        """Bind the front end's sockets where the process will find them."""

    @abstractmethod
    def beginning(self) -> AbstractAsyncContextManager[None]:
        """Let the process begin, if it has not; until the end of the block it has.

        ValueError: it is not there.
        """

    @abstractmethod
    def make_stop_watch(self) -> Callable[[], bool]:
        """Return what says whether a signal has stopped the process for a while."""

    @abstractmethod
    def end(self, grace_seconds: float = 0.0) -> None:
        """Give the process ``grace_seconds`` to end, then kill it."""


class HandleOfFolder(AnyCoreHandle):
    """A process that meets the front end in a folder of this machine."""

    _folder: str

    def bind(self, commands: zmq.Socket[Any], reports: zmq.Socket[Any]) -> None:
        commands.bind(command_address(self._folder))
        reports.bind(report_address(self._folder))

    @asynccontextmanager
    async def beginning(self) -> AsyncGenerator[None, None]:
        """Do nothing: it begins without being asked."""
        yield


class CoreHandle(ChildProcess, HandleOfFolder):
    """The process of an engine core of this machine, from its start to its end."""

    def __init__(self) -> None:
        """Start the process; it loads its modules while the caller makes the config.

        ValueError: there is no writable folder for temporary files.
        """
        self._folder = private_folder("vllm-core-")
        super().__init__("vllm.v1.engine.core_process", self._folder)

    def configure(self, vllm_config: VllmConfig) -> None:
        """Hand the config over. EngineDeadError: the process is gone."""
        # Not at the top of the file: this loads torch, as the new process does meanwhile.
        from vllm.config.connectors import REGISTERED
        from vllm.model_classes import ModelRegistry
        from vllm.v1.engine.core_process import CoreSettings

        settings = CoreSettings(
            vllm_config=vllm_config,
            models=ModelRegistry.snapshot(),
            connectors=dict(REGISTERED),
            log_format=log_format(),
        )
        try:
            self.send(settings)
        except BrokenPipeError:
            raise EngineDeadError("the engine core's process ended before it started") from None

    def wait_for_end(self) -> str:
        ending = f"the engine core's process ended with status {self.wait()}"
        return with_last_lines(ending, self.last_lines)

    def make_stop_watch(self) -> Callable[[], bool]:
        return StopWatch("the engine core", self.pid).check


class AsyncCoreClient:
    """Sends commands and receives reports on an asyncio loop.

    ``on_report`` gets every report; ``on_death`` is called once, if the process ends
    without being asked to.
    """

    def __init__(
        self,
        handle: AnyCoreHandle,
        on_report: Callable[[CoreReport], None],
        on_death: Callable[[str], None],
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        """context: that of several clients, which their owner ends."""
        self._handle = handle
        self._on_report = on_report
        self._on_death = on_death
        self.stats = EngineStats()
        """Statistics of the last report."""
        self._own_context: zmq.asyncio.Context | None = None
        if context is None:
            context = self._own_context = zmq.asyncio.Context()
        self._commands = context.socket(zmq.PUSH)
        self._reports = context.socket(zmq.PULL)
        handle.bind(self._commands, self._reports)
        # The same sockets for what needs no waiting.
        self._commands_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._commands)
        self._reports_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._reports)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: list[bytes] = []
        """Commands that wait until the event loop has time; they are sent together."""
        self._sender: asyncio.Task[None] | None = None
        self._is_closing = False
        self._receiver: asyncio.Task[None] | None = None
        self._stop_watcher: asyncio.Task[None] | None = None
        self._is_core_stopped = self._has_stopped_rank = False

    async def start(self) -> CoreStarted:
        """Wait until the core is ready.

        ValueError: the core refused the configuration. EngineDeadError: it could not start for
        another reason.
        """
        async with self._handle.beginning():
            while not await self._reports.poll(START_POLL_MILLISECONDS):
                if not self._handle.is_alive:
                    raise EngineDeadError(
                        f"{self._handle.wait_for_end()} before it was ready; its log says why"
                    )
        started = msgspec.msgpack.decode(await self._reports.recv(), type=CoreStarted)
        if started.failure is not None:
            if started.failure.kind is FailureKind.BAD_REQUEST:
                raise ValueError(started.failure.message)
            raise EngineDeadError(started.failure.message)
        loop = asyncio.get_running_loop()
        self._receiver = loop.create_task(self._receive())
        self._stop_watcher = loop.create_task(self._watch_for_stops())
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        return started

    async def send(self, command: CoreCommand) -> None:
        """Hand a command to the core. EngineDeadError: it is gone."""
        if self._commands.closed:
            raise EngineDeadError("the engine core's process has ended")
        self._unsent.append(self._encoder.encode(command))
        if len(self._unsent) == 1 and self._sender is None:
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        """Send what there is, at once if the socket takes it."""
        if not self._unsent or self._commands.closed:
            return
        message, self._unsent = joined(self._unsent), []
        try:
            self._commands_now.send(message, zmq.NOBLOCK)
        except zmq.Again:
            self._sender = asyncio.get_running_loop().create_task(self._send_later(message))

    async def _send_last(self, command: CoreCommand) -> None:
        """Send a command and all before it. A core that has just died never takes them."""
        await self.send(command)
        if self._sender is None:
            self._send_all()
        while self._sender is not None:
            await self._sender

    async def _send_later(self, message: bytes) -> None:
        try:
            await self._commands.send(message)
        except asyncio.CancelledError:
            if not self._commands.closed:  # see _die
                raise
        finally:
            self._sender = None
        self._send_all()

    async def _receive(self) -> None:
        decoder = ReportDecoder()
        while True:
            self._take(decoder.decode(await self._reports.recv_multipart()))
            with contextlib.suppress(zmq.Again):
                for _ in range(MOST_REPORTS_AT_ONCE):
                    self._take(decoder.decode(self._reports_now.recv_multipart(zmq.NOBLOCK)))
                await asyncio.sleep(0)

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process for a while, or one of its ranks; it may go
        on."""
        return self._is_core_stopped or self._has_stopped_rank

    def _take(self, report: CoreReport) -> None:
        if report.has_stopped_rank is not None:
            self._has_stopped_rank = report.has_stopped_rank
            return
        self.stats = report.stats
        self._on_report(report)

    async def _watch_for_stops(self) -> None:
        is_stopped = self._handle.make_stop_watch()
        while self._handle.is_alive:
            self._is_core_stopped = is_stopped()
            await asyncio.sleep(STOP_POLL_SECONDS)
        self._is_core_stopped = self._has_stopped_rank = False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        message = self._handle.wait_for_end()
        if not self._is_closing:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._die, message)

    def _die(self, message: str) -> None:
        # What waits to be sent will never be taken: closing ends what sends it.
        self._commands.close(linger=0)
        self._on_death(message)

    def abandon(self) -> None:
        """End the core's process and the sockets; the event loop has ended."""
        self._is_closing = True
        self._handle.end()
        self._close_sockets()

    async def close(self) -> None:
        """Let the core complete its files and end. A core that has not started has no files."""
        self._is_closing = True
        if self._receiver is None:
            self._handle.end()
        else:
            with contextlib.suppress(TimeoutError, EngineDeadError):
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await self._send_last(Shutdown())
            await call_in_thread(self._handle.end, SHUTDOWN_SECONDS)
            self._receiver.cancel()
        if self._stop_watcher is not None:
            self._stop_watcher.cancel()
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the sockets, then the context, which would wait for them: it has forgotten them
        if the garbage collector is here."""
        self._commands.close(linger=0)
        self._reports.close(linger=0)
        if self._own_context is not None:
            self._own_context.destroy(linger=0)
