"""One of several HTTP processes of a server (:mod:`vllm.utils.child_process`).

It gets connections from the server's process (``http_processes.py``), whose engine it shares as a
guest (``v1/engine/guests.py``). It answers the requests that take its time: those that run the
model, tokenise or render. All others it passes on to the server's process, which alone has what
they read or change. Of that it knows only what requests for the model need: names of adapters and
steering vectors, and whether the server is shutting down.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore, storage_folder
from vllm.entrypoints.openai.http_server import make_http_server
from vllm.entrypoints.openai.limits import GENERATION_PATHS, endpoint_path
from vllm.entrypoints.openai.row_memory import RowMemory
from vllm.entrypoints.openai.server_load import ServerLoad, SharedNumbers
from vllm.entrypoints.openai.server_metrics import ServerMetrics
from vllm.entrypoints.openai.state import ServerState
from vllm.logger import LogFormat, init_logger, set_log_format
from vllm.utils.child_process import receive_settings
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.utils.process_calls import CallServer, call, converse
from vllm.v1.engine.guests import GuestHandle
from vllm.v1.metrics.prometheus import MeteredAsyncLLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

ANSWERED_HERE = GENERATION_PATHS | {
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/tokenize",
    "/detokenize",
    "/version",
    "/docs",
    "/openapi.json",
}
"""Paths of requests that are not passed on."""
_PASSED_ON = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)
"""Entries of a request's scope that can be sent to another process."""


@dataclass(frozen=True)
class HttpProcessSettings:
    """Everything that an HTTP process needs to know."""

    number: int
    vllm_config: VllmConfig
    server: ServerSettings
    served_model_names: list[str]
    chat_template: str | None
    host_path: str
    """The socket at which the server's process answers calls."""
    numbers_path: str
    """The file of the :class:`SharedNumbers`."""
    connections_fd: int
    """The socket from which connections come."""
    log_format: LogFormat


def calls_path(folder: str) -> str:
    """Path of the socket at which an HTTP process answers calls of the server's."""
    return os.path.join(folder, "calls")


class RemoteStore(HiddenStatesStore):
    """The store of the server's process, as far as replies need it."""

    host_path: str

    async def announce(self, path: str) -> None:
        await call(self.host_path, "add_file", path)

    async def admit(self) -> None:
        await call(self.host_path, "check_quota")

    def add(self, path: str, age_seconds: float = 0.0) -> str | None:
        """Return a file's id. Files of connectors are known in the server's process already."""
        return self.id_of(path)


class RemoteRowMemory(RowMemory):
    """The memory for rows of all HTTP processes, which the server's process shares out."""

    def __init__(self, host_path: str) -> None:
        super().__init__(0)
        self._host_path = host_path

    async def reserve(self, num_bytes: int, until: ExitStack) -> None:
        """Do what :meth:`RowMemory.reserve` does: a conversation is as long as the reservation."""
        conversation = await converse(self._host_path, "reserve_rows", num_bytes)
        try:
            refusal: Exception | None = await conversation.receive()
            if refusal is not None:
                raise refusal
        except BaseException:
            conversation.close()
            raise
        until.callback(conversation.close)


class PassOn:
    """The ASGI layer that passes requests on to the server's process."""

    def __init__(self, app: ASGIApp, host_path: str) -> None:
        self._app, self._host_path = app, host_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or endpoint_path(scope) in ANSWERED_HERE:
            await self._app(scope, receive, send)
            return
        body, has_more = bytearray(), True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        sent = {name: scope[name] for name in _PASSED_ON if name in scope}
        conversation = await converse(self._host_path, "answer", sent, bytes(body))
        try:
            has_more = True
            while has_more:
                message = await conversation.receive()
                await send(message)
                is_body = message["type"] == "http.response.body"
                has_more = not is_body or message.get("more_body", False)
        except EOFError:
            logger.warning("the reply to %s %s was cut off", scope["method"], scope["path"])
        finally:
            conversation.close()


class HttpProcess:
    """The process, in its event loop."""

    def __init__(self, settings: HttpProcessSettings, folder: str) -> None:
        self._settings, self._folder = settings, folder
        self._handle = GuestHandle(folder)
        self._engine = MeteredAsyncLLM(
            settings.vllm_config,
            handle=self._handle,
            num_renderer_threads=settings.server.renderer_num_workers,
        )
        self._numbers = SharedNumbers.open(settings.numbers_path)
        self._connections = socket.socket(fileno=settings.connections_fd)
        self._connections.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = -1
        """Number of the last change of what is shared."""

    async def run(self) -> None:
        """Serve until the server's process says that it is the end."""
        settings = self._settings
        await self._engine.start()
        self._state = self._make_state()
        layer = Middleware(PassOn, host_path=settings.host_path)
        self._http = make_http_server(self._state, layer)
        self._http.on_connection_end = self._count_end
        functions: dict[str, Callable[..., Awaitable[Any]]] = {
            "counts": self._counts,
            "share": self._take_shared,
            "die": self._die,
            "stop": self._stop,
        }
        calls = CallServer(functions)
        await calls.listen(calls_path(self._folder))
        await self._take_shared(*await call(settings.host_path, "begin", settings.number))
        settle_garbage_collector()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connections, self._take_connections)
        await self._http.serve(sockets=[])
        loop.remove_reader(self._connections)
        await self._engine.shutdown()
        await calls.close()

    def _make_state(self) -> ServerState:
        settings, config = self._settings, self._settings.vllm_config
        metrics = ServerMetrics(lambda: self._engine.stats, settings.served_model_names[0])
        self._engine.metrics = metrics
        store = RemoteStore.from_config(config, settings.server)
        if store is not None:
            assert isinstance(store, RemoteStore)
            store.host_path = settings.host_path
        state = ServerState(
            engine=self._engine,
            settings=settings.server,
            served_model_names=settings.served_model_names,
            chat_template=settings.chat_template,
            store=store,
            storage_folder=storage_folder(config, settings.server),
            metrics=metrics,
            load=ServerLoad(self._numbers.load, settings.number),
        )
        state.row_memory = RemoteRowMemory(settings.host_path)
        return state

    # ---- connections

    def _take_connections(self) -> None:
        """Take the connections that have come."""
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
            except BlockingIOError:
                return
            if not descriptors:  # the server's process has ended
                return
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._http.take_connection(connection)
        except OSError as error:  # mostly a handshake that the client did not complete
            logger.debug("a connection could not be served: %s", error)
            connection.close()
            self._count_end()

    def _count_end(self) -> None:
        self._numbers.closed[self._settings.number] += 1

    # ---- calls of the server's process

    async def _counts(self) -> dict[str, Any]:
        return self._state.metrics.counts()

    async def _take_shared(self, version: int, shared: tuple[Any, ...]) -> None:
        if version > self._version:
            self._version = version
            self._state.take_shared(shared)

    async def _die(self, reason: str) -> None:
        self._handle.take_end(reason)

    async def _stop(self, grace_seconds: int) -> None:
        self._http.config.timeout_graceful_shutdown = grace_seconds
        self._http.should_exit = True


def main(folder: str) -> int:
    settings: HttpProcessSettings = receive_settings(folder)
    set_log_format(settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpProcess(settings, folder).run())
    return 0
