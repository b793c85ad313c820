"""A small application behind the gate, on a free port of this machine, without an engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from vllm.entrypoints.openai.adapters import ServedAdapters
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.http_protocol import limited_protocol
from vllm.entrypoints.openai.http_server import HttpServer
from vllm.entrypoints.openai.limits import install_limits
from vllm.entrypoints.openai.server import bind
from vllm.entrypoints.openai.server_load import ServerLoad
from vllm.entrypoints.openai.server_metrics import ServerMetrics
from vllm.entrypoints.openai.state import nothing_to_share
from vllm.v1.engine.core_messages import EngineStats

START_SECONDS = 30.0


@dataclass
class GateState:
    """The part of a server's state that the gate and the routers use."""

    settings: ServerSettings
    served_model_names: list[str] = field(default_factory=lambda: ["tiny"])
    store: Any = None
    stats: EngineStats = field(default_factory=EngineStats)
    load: ServerLoad = field(default_factory=ServerLoad)
    is_draining: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    storage_folder: str | None = None
    metrics: ServerMetrics = field(init=False)
    model_name: str = field(init=False)
    adapters: ServedAdapters = field(init=False)
    max_model_len: int = 64
    received: list[int] = field(default_factory=list)
    """Bytes of each body that an endpoint read to its end."""
    cancelled: int = 0
    count_all: Callable[[], Awaitable[None]] = nothing_to_share
    share: Callable[[], Awaitable[None]] = nothing_to_share

    def __post_init__(self) -> None:
        self.model_name = self.served_model_names[0]
        self.adapters = ServedAdapters(cast("Any", None), self.served_model_names)
        self.metrics = ServerMetrics(lambda: self.stats, self.model_name)

    @property
    def server_load(self) -> int:
        return self.load.total


@dataclass
class Gate:
    """A running server."""

    port: int
    state: GateState

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send bytes, read the answer until the server closes or it is complete."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content, read with nothing but a socket."""
    file = connection.makefile("rb", buffering=0)  # the next response stays in the socket
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length")
    if length is None:
        return status, headers, file.read()
    content = b""
    while len(content) < int(length) and (part := file.read(int(length) - len(content))):
        content += part
    return status, headers, content


def error_of(content: bytes) -> dict[str, Any]:
    """The error in a body, whose form is checked."""
    body = json.loads(content)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def make_app(state: GateState) -> FastAPI:
    """Endpoints that read, wait and stream; ``state`` says what became of them."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.body()
        state.received.append(len(body))
        asked = json.loads(body)
        try:
            if asked.get("stream"):
                return StreamingResponse(stream(asked), media_type="text/event-stream")
            await asyncio.sleep(asked.get("seconds", 0))
        except asyncio.CancelledError:
            state.cancelled += 1
            raise
        return {"ok": True}

    async def stream(asked: dict[str, Any]) -> Any:
        try:
            while True:
                yield b"data: {}\n\n"
                await asyncio.sleep(asked["seconds"])
        except asyncio.CancelledError:
            state.cancelled += 1
            raise

    @app.get("/load")
    async def load() -> Any:
        return {"server_load": state.load.total}

    @app.get("/v1/models")
    async def models() -> Any:
        return []

    @app.post("/broken")
    async def broken() -> Any:
        raise ZeroDivisionError

    return app


@contextmanager
def gate(
    make: Callable[[GateState], FastAPI] = make_app, state: GateState | None = None, **options: Any
) -> Iterator[Gate]:
    """A server whose settings are ``options``."""
    settings = ServerSettings(**options)
    state = state or GateState(settings)
    app = make(state)
    install_limits(app, settings, state)  # type: ignore[arg-type]
    with serving(app, settings.root_path, settings.max_head_bytes) as port:
        yield Gate(port, state)


@contextmanager
def serving(app: FastAPI, root_path: str = "", max_head_bytes: int = 1 << 16) -> Iterator[int]:
    """``app`` on uvicorn in a thread; the port."""
    config = uvicorn.Config(
        app,
        http=limited_protocol(max_head_bytes),
        log_level="critical",
        root_path=root_path,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config)
    with bind(ServerSettings(host="127.0.0.1", port=0)).socket as listener:
        done = threading.Event()
        port = listener.getsockname()[1]

        def run() -> None:
            try:
                asyncio.run(server.serve(sockets=[listener]))
            finally:
                done.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            assert wait_until(lambda: server.started or done.is_set()) and server.started
            yield port
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)


def wait_until(is_true: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
    """Wait, and return whether ``is_true()`` becomes true in time."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if is_true():
            return True
        pause.wait(0.01)
    return is_true()


__all__ = ["Gate", "GateState", "error_of", "gate", "read_response"]
