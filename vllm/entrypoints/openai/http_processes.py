"""Several HTTP processes of one server (``--api-server-count``), seen from the server's process.

    client -> connection accepted here -> the process with the fewest connections (http_process.py)
    requests for the model, tokenising, rendering: answered there; the engine is here (guests.py)
    all other requests: passed on to here, answered by the one state that there is

Connections are handed out one by one, because neither the kernel's hash of addresses
(SO_REUSEPORT) nor a listening socket that processes share spreads a few connections evenly, and
because connections that wait to be accepted outlive the process that ends.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope

from vllm.entrypoints.openai.http_process import HttpProcessSettings, calls_path
from vllm.entrypoints.openai.http_server import CLOSE_SECONDS
from vllm.entrypoints.openai.server_load import ServerLoad, SharedNumbers
from vllm.logger import init_logger, log_format
from vllm.utils.child_process import ChildProcess, private_folder
from vllm.utils.process_calls import CallConnection, CallServer, call
from vllm.utils.stop_watch import StopWatch
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.state import ServerState

logger = init_logger(__name__)

POLL_SECONDS = 0.05
BACKLOG = 2048
"""Connections that may wait to be accepted."""
CALL_SECONDS = 10.0
"""Time after which a process that does not answer a call is ended."""
END_SECONDS = 5.0
"""Time that a process has to end after its connections have."""


class _Process:
    """One HTTP process."""

    def __init__(self, number: int) -> None:
        """Start it: it loads its modules, and waits for its settings."""
        self.number = number
        self.folder = private_folder("vllm-http-")
        self.connections, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.setblocking(False)
        self.connections_fd = theirs.fileno()
        module = "vllm.entrypoints.openai.http_process"
        with theirs:
            self.child = ChildProcess(module, self.folder, [self.connections_fd])
        self.num_connections = 0
        """Connections that it has got since the last restart, and those of the process before."""
        self.is_ready = False
        self.is_stopped = StopWatch(f"HTTP process {number}", self.child.pid).check
        self.counts: dict[str, Any] = {}
        """Its metrics as they were when they were last asked for."""

    async def call(self, name: str, *arguments: object) -> Any:
        """Call a function of it. OSError or EOFError: it has gone. TimeoutError: no answer."""
        async with asyncio.timeout(CALL_SECONDS):
            return await call(calls_path(self.folder), name, *arguments)

    def end(self, grace_seconds: float = 0.0) -> None:
        self.child.end(grace_seconds)
        self.connections.close()


class HttpProcesses:
    """The HTTP processes of one server; used as its :class:`.HttpServer` is."""

    def __init__(self, num_processes: int) -> None:
        """Start them. ValueError: there is no writable folder for temporary files."""
        self._folder = private_folder("vllm-server-")
        self._numbers_path = os.path.join(self._folder, "numbers")
        self._numbers = SharedNumbers.create(self._numbers_path, num_processes)
        self._processes = [_Process(number) for number in range(num_processes)]
        self._sharing = asyncio.Lock()
        self._version = 0
        self._grace_seconds = CLOSE_SECONDS
        self.started = False
        self.should_exit = False

    def abandon(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def attach(self, state: ServerState) -> None:
        """Serve a state, whose engine has started."""
        from vllm.entrypoints.openai.api_server import build_endpoints

        self._state = state
        state.load = ServerLoad(self._numbers.load)
        state.share, state.count_all = self.share, self._count_all
        if state.store is not None:
            state.engine.on_guest_file.append(state.store.add)
        self._app, _ = build_endpoints(state)
        functions: dict[str, Callable[..., Awaitable[Any]]] = {
            "begin": self._begin,
            "add_file": self._add_file,
            "check_quota": self._check_quota,
        }
        conversations: dict[str, Callable[..., Awaitable[None]]] = {
            "answer": self._answer,
            "reserve_rows": self._reserve_rows,
        }
        self._calls = CallServer(functions, conversations)

    def allow(self, grace_seconds: int) -> None:
        """Set the time that connections have to end once ``should_exit`` is set."""
        self._grace_seconds = grace_seconds

    # ---- the processes

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until ``should_exit`` is set. EngineDeadError: a process did not start."""
        (listening,) = sockets
        listening.setblocking(False)
        listening.listen(BACKLOG)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._calls.listen(self._host_path)
            for process in self._processes:
                await self._configure(process)
            tasks += [asyncio.create_task(self._watch(one.number)) for one in self._processes]
            tasks.append(asyncio.create_task(self._accept(listening)))
            while not self.should_exit:
                done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS)
                for task in done:
                    task.result()
                if all(process.is_ready for process in self._processes):
                    self.started = True
                if self._state.engine.errored:
                    await self._tell_of_death()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listening.close()
            await self._stop()

    @property
    def _host_path(self) -> str:
        return os.path.join(self._folder, "calls")

    async def _configure(self, process: _Process) -> None:
        state = self._state
        self._state.engine.guests.connect(process.folder)
        settings = HttpProcessSettings(
            number=process.number,
            vllm_config=state.engine.vllm_config,
            server=state.settings,
            served_model_names=state.served_model_names,
            chat_template=state.chat_template,
            host_path=self._host_path,
            numbers_path=self._numbers_path,
            connections_fd=process.connections_fd,
            log_format=log_format(),
        )
        with suppress(BrokenPipeError):  # it has ended, which is noticed elsewhere
            await asyncio.to_thread(process.child.send, settings)

    async def _watch(self, number: int) -> None:
        """Start a process again when it has ended. EngineDeadError: it was not ready."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            process = self._processes[number]
            if process.is_ready and process.is_stopped():
                process.child.end()
            status = process.child.status
            if status is None:
                continue
            name = f"HTTP process {number} (process {process.child.pid})"
            if not process.is_ready:
                raise EngineDeadError(f"{name} ended with status {status} before it was ready")
            logger.error(
                "%s ended with status %d; its requests are aborted, and it is started again",
                *(name, status),
            )
            await self._replace(process)

    async def _replace(self, process: _Process) -> None:
        process.is_ready = False
        process.end()
        await self._state.engine.guests.drop(process.folder)
        if process.counts:  # what was shown once is never taken back
            self._state.metrics.add_counts(process.counts)
        self._numbers.load[process.number] = 0
        self._numbers.closed[process.number] = 0
        self._processes[process.number] = successor = _Process(process.number)
        await self._configure(successor)

    async def _stop(self) -> None:
        """Let the processes end, in time. Requests that still wait end first if the engine has."""
        if self._state.engine.errored:
            await self._tell_of_death()

        async def stop(process: _Process) -> None:
            if process.is_ready:
                with suppress(OSError, EOFError, TimeoutError):
                    await process.call("stop", self._grace_seconds)
                    seconds = self._grace_seconds + END_SECONDS
                    await asyncio.to_thread(process.child.end, seconds)
            process.end()
            await self._state.engine.guests.drop(process.folder)

        await asyncio.gather(*map(stop, self._processes))
        await self._calls.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _call_all(self, name: str, *arguments: object) -> list[Any]:
        """Call a function of all that are ready; one that does not answer is ended."""

        async def call_one(process: _Process) -> Any:
            try:
                return await process.call(name, *arguments)
            except (OSError, EOFError):  # it has ended
                return None
            except TimeoutError:
                logger.error("HTTP process %d does not answer and is ended", process.number)
                process.child.end()
                return None

        ready = [process for process in self._processes if process.is_ready]
        return await asyncio.gather(*map(call_one, ready))

    async def _tell_of_death(self) -> None:
        await self._call_all("die", "the engine has ended")

    # ---- what the processes share

    async def share(self) -> None:
        """Let all processes have the state as it is now."""
        async with self._sharing:
            self._version += 1
            await self._call_all("share", self._version, self._state.shared())

    async def _count_all(self) -> None:
        async def count(process: _Process) -> None:
            if process.is_ready:
                with suppress(OSError, EOFError, TimeoutError):
                    process.counts = await process.call("counts")

        await asyncio.gather(*map(count, self._processes))
        self._state.metrics.of_others = [process.counts for process in self._processes]

    async def _begin(self, number: int) -> tuple[int, tuple[object, ...]]:
        self._processes[number].is_ready = True
        return self._version, self._state.shared()

    async def _add_file(self, path: str) -> None:
        if self._state.store is not None:
            self._state.store.add(path)

    async def _check_quota(self) -> None:
        if self._state.store is not None:
            self._state.store.check_quota()

    async def _reserve_rows(self, connection: CallConnection, num_bytes: int) -> None:
        """Reserve memory for rows until the caller closes the connection."""
        with ExitStack() as until:
            gone = asyncio.create_task(connection.gone())
            reserving = asyncio.create_task(self._state.row_memory.reserve(num_bytes, until))
            try:
                await asyncio.wait((gone, reserving), return_when=asyncio.FIRST_COMPLETED)
                if reserving.done():
                    await connection.send(reserving.exception())
                    await gone
            finally:
                gone.cancel()
                reserving.cancel()
                await asyncio.gather(gone, reserving, return_exceptions=True)

    async def _answer(self, connection: CallConnection, scope: Scope, body: bytes) -> None:
        """Answer a request of a client by the endpoints of this process."""
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await connection.gone()
            return {"type": "http.disconnect"}

        await self._app(scope, receive, connection.send)

    # ---- connections

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # the client has gone
                logger.error("no connection can be accepted: %s", error)
                await asyncio.sleep(1.0)
                continue
            with connection:
                if connection.family != socket.AF_UNIX:  # answers are not to wait for others
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._hand_out(connection):
                    await asyncio.sleep(POLL_SECONDS)

    def _hand_out(self, connection: socket.socket) -> bool:
        """Send a connection to the process with the fewest; False: none takes one now."""
        ready = [process for process in self._processes if process.is_ready]
        for process in sorted(ready, key=self._num_open):
            try:
                socket.send_fds(process.connections, [b"c"], [connection.fileno()])
            except OSError:  # it has ended, or does not take what it has got
                continue
            process.num_connections += 1
            return True
        return False

    def _num_open(self, process: _Process) -> int:
        return process.num_connections - self._numbers.closed[process.number]
