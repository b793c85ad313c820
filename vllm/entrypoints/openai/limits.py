"""What stands between the network and the endpoints: keys, sizes, times, numbers, and whether a
reply has arrived.

:class:`RequestGate` is the one ASGI layer around the endpoints but for CORS (Starlette's). Nothing
of a body is kept here. When a limit is reached after the endpoint began to read, the endpoint
sees a client that went away, and the gate answers in its place.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import STATUS_CLIENT_GONE, ApiError
from vllm.entrypoints.openai.http_protocol import connection_of
from vllm.v1.engine.async_llm import UndeliveredFiles

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.entrypoints.openai.state import ServerState

OPEN_PATHS = {
    "/", "/health", "/ping", "/version", "/load", "/metrics", "/metrics/",
    "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
}  # fmt: skip
"""Paths that answer without a key, and while the server drains."""
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""POST requests that are admitted, counted for ``/load``, timed, and aborted when their client
goes."""
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * 2**20
"""How long, and how far, a body is thrown away so that its client can read the refusal."""
_FILES = "vllm.reply_files"
_DISCONNECT: Message = {"type": "http.disconnect"}


def reply_files(scope: Scope) -> UndeliveredFiles:
    """The files that the reply to this request names: the engine's outputs go through here.

    They belong to the reply until its last byte has gone to the client's socket, and to the
    client from then on. Whatever comes first, they are removed.
    """
    files: UndeliveredFiles = scope[_FILES]
    return files


@dataclass(eq=False)
class Exchange:
    """One request and its reply, between the connection and the endpoint."""

    scope: Scope
    _receive: Receive
    _send: Send
    _settings: ServerSettings
    _count: Callable[[int], None]
    """Gets the status of the reply."""
    limit: ApiError | None = None
    """That which the body has reached."""
    is_started: bool = False
    """Whether the reply has begun."""
    _num_bytes: int = 0
    _is_read: asyncio.Event = field(default_factory=asyncio.Event)
    _watcher: asyncio.Task[None] | None = None
    _is_event_stream: bool = False
    _is_complete: bool = False
    _is_delivered: bool = False

    def __post_init__(self) -> None:
        self._files = self.scope[_FILES] = UndeliveredFiles()
        self._deadline = asyncio.get_running_loop().time() + self._settings.body_timeout

    # ---- what the endpoint calls

    async def receive(self) -> Message:
        """The next of the request's body, within its limits."""
        if self._is_read.is_set():  # waiting for the client to go may take as long as it likes
            return await self._receive()
        if self.limit is not None:
            return _DISCONNECT
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            seconds = self._settings.body_timeout
            self.limit = ApiError(
                408, f"The request body was not complete after {seconds:g} s (--body-timeout)"
            )
            return _DISCONNECT
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._settings.max_body_bytes:
            self.limit = body_too_large(self._settings)
            return _DISCONNECT
        if not message.get("more_body", False):
            self._is_read.set()
        return message

    async def send(self, message: Message) -> None:
        """Part of the endpoint's reply; none of it counts once the gate answers instead."""
        if self.limit is None or self.is_started:
            await self._pass(message)

    # ---- what the gate calls

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """The task inside is cancelled when the client closes its connection before the last of
        the reply is on its way, and ends with ClientDisconnect."""
        task = asyncio.current_task()
        assert task is not None
        num_cancelling, is_gone = task.cancelling(), False

        async def watch() -> None:
            nonlocal is_gone
            await self._is_read.wait()
            await self._disconnected()
            is_gone = True
            task.cancel()

        self._watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError as error:
            if not is_gone or task.uncancel() > num_cancelling:
                raise
            raise ClientDisconnect from error
        finally:
            self._watcher.cancel()
            self._watcher = None  # else its traceback and this object keep each other

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error."""
        await error.response()(self.scope, self._receive, self._pass)

    async def refuse_body(self, error: ApiError) -> None:
        """Answer with an error while the client still sends, then end the connection.

        What comes is thrown away for a while: closing at once would take the answer away from
        who has not read it. But a client that waits for leave to send its body sends none.
        """
        waits_for_leave = self.limit is None and "expect" in Headers(scope=self.scope)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body" and not waits_for_leave:
                await self._pass({**message, "more_body": True})
                await self._throw_away()
                message = {"type": "http.response.body"}
            await self._pass(message)

        response = error.response()
        response.headers["connection"] = "close"
        await response(self.scope, self._receive, send)

    async def cut_off(self, error: ApiError) -> None:
        """End whatever there is: with an error, or with one as the last event of a stream."""
        self._files.discard()
        if not self.is_started:
            await self.refuse(error)
        elif not self._is_complete:
            event = f"data: {error.body().model_dump_json()}\n\n".encode()
            last = event if self._is_event_stream else b""
            await self._pass({"type": "http.response.body", "body": last})

    def end(self) -> None:
        """Nothing more will be said."""
        if not self._is_delivered:
            self._files.discard()

    # ---- to and from the connection

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            self._is_event_stream = content_type.startswith("text/event-stream")
            self._count(message["status"])
            if message["status"] != 200:
                self._files.discard()
        elif not message.get("more_body", False):
            self._is_complete = True
            if self._watcher is not None:
                self._watcher.cancel()
            if self._files:
                await self._deliver(message)
                return
        await self._send(message)

    async def _deliver(self, last: Message) -> None:
        """Send the last of a reply that names files; they are the client's once it has gone."""
        connection = connection_of(self.scope)
        if connection.has_client():
            await self._send(last)
            self._is_delivered = await connection.flushed()
        else:
            await self._disconnected()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _throw_away(self) -> None:
        """Read the rest of the body, as far as there is patience."""
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def body_too_large(settings: ServerSettings) -> ApiError:
    """For a body above ``--max-body-bytes``."""
    return ApiError(
        413,
        f"The request body is longer than {settings.max_body_bytes} bytes, the most this server "
        "takes (--max-body-bytes)",
    )


class RequestGate:
    """See the module. One object a server."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, state: ServerState) -> None:
        self._app, self._settings, self._state = app, settings, state
        self._keys = [key.encode() for key in settings.accepted_keys]
        self._count = state.metrics.count_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._settings, self._count)
        try:
            await self._answer(exchange)
        except ClientDisconnect:
            if not exchange.is_started:
                self._count(STATUS_CLIENT_GONE)
        except Exception:
            if not exchange.is_started:  # the application answers with 500, outside of this
                self._count(500)
            raise
        finally:
            exchange.end()

    async def _answer(self, exchange: Exchange) -> None:
        scope = exchange.scope
        path, headers = endpoint_path(scope), Headers(scope=scope)
        is_generation = scope["method"] == "POST" and path in GENERATION_PATHS
        is_open = path in OPEN_PATHS or scope["method"] == "OPTIONS"
        refusal = None if is_open else self._refusal(headers, is_generation)
        if refusal is not None:
            await exchange.refuse(refusal)
        elif int(headers.get("content-length", 0)) > self._settings.max_body_bytes:
            await exchange.refuse_body(body_too_large(self._settings))
        else:
            await (self._generate(exchange) if is_generation else self._pass_on(exchange))
            if exchange.limit is not None and not exchange.is_started:
                await exchange.refuse_body(exchange.limit)

    def _refusal(self, headers: Headers, is_generation: bool) -> ApiError | None:
        """Why this request is not even read; None: it is."""
        if self._keys and not self._has_key(headers):
            return ApiError(401, "This server asks for a key: Authorization: Bearer KEY")
        if self._state.is_draining:
            return ApiError(503, "The server is about to end; ask another one, or later")
        limit = self._settings.max_queued_requests
        if is_generation and self._state.server_load >= limit:
            return ApiError(
                429,
                f"{limit} requests are unfinished, the most this server takes on "
                "(--max-queued-requests); try again later",
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        content = given.strip().encode("latin-1")
        # Every key is compared in full, so that the time taken says nothing about them.
        matches = [hmac.compare_digest(content, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _generate(self, exchange: Exchange) -> None:
        """As :meth:`_pass_on`, counted; cancelled, hence aborted, when its time is over or its
        client goes."""
        seconds = self._settings.request_timeout
        self._state.server_load += 1
        try:
            async with asyncio.timeout(seconds) as deadline, exchange.while_connected():
                await self._pass_on(exchange)
        except TimeoutError:
            if not deadline.expired():
                raise
            message = (
                f"The request was not complete after {seconds:g} s and was aborted "
                "(--request-timeout)"
            )
            await exchange.cut_off(ApiError(504, message))
        finally:
            self._state.server_load -= 1

    async def _pass_on(self, exchange: Exchange) -> None:
        """Let the endpoint answer; what it says of a body that was cut off does not count."""
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            if exchange.limit is None or exchange.is_started:
                raise


def endpoint_path(scope: Scope) -> str:
    """The path without the prefix under which a proxy shows it.

    uvicorn puts the prefix before every path. Where it was there already, one is taken away.
    """
    root: str = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root)
    if root and f"{path}/".startswith(f"{root}/"):
        scope["path"] = path
        path = path.removeprefix(root)
    return path or "/"


def install_limits(app: FastAPI, settings: ServerSettings, state: ServerState) -> None:
    """Put the gate and CORS before the endpoints of ``app``."""
    app.add_middleware(RequestGate, settings=settings, state=state)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["ETag", "Content-Range", "Retry-After"],
    )
