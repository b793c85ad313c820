"""The layer between the network and the endpoints: keys, limits of size, time and number, and
the delivery of replies.

:class:`RequestGate` is the only ASGI layer around the endpoints except CORS (Starlette's). It
keeps no part of a body. When a limit is reached after the endpoint began to read, the endpoint
sees a client that went away, and the gate answers instead.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import STATUS_CLIENT_GONE, ApiError
from vllm.entrypoints.openai.http_protocol import connection_of
from vllm.v1.engine.request_stream import UndeliveredFiles

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.entrypoints.openai.state import ServerState

OPEN_PATHS = {
    "/", "/health", "/health/", "/ping", "/version", "/load", "/metrics", "/metrics/",
    "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
}  # fmt: skip
"""Paths that answer without a key, and while the server shuts down."""
GENERATION_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/generate/",
        "/chat/",
        "/get_sequence_logprobs/",
        "/v1/embeddings",
        "/pooling",
        "/classify",
    }
)
"""Paths of POST requests that are limited in number, counted for ``/load``, timed, and aborted
when their client disconnects."""
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * 2**20
"""Limit of a body that is read and dropped so that its client can read the refusal."""
_FILES = "vllm.reply_files"
_AT_END = "vllm.at_end"
_DISCONNECT: Message = {"type": "http.disconnect"}


def reply_files(scope: Scope) -> UndeliveredFiles:
    """Return the files that the reply to this request names; the engine's outputs add them.

    They belong to the reply until its last byte has gone to the client's socket, and to the
    client from then on. If the reply ends in any other way before that, they are removed.
    """
    files: UndeliveredFiles = scope[_FILES]
    return files


def at_end(scope: Scope) -> ExitStack:
    """Return the stack of what is done when the exchange of this request ends."""
    stack: ExitStack = scope[_AT_END]
    return stack


@dataclass(eq=False)
class Exchange:
    """One request and its reply, between the connection and the endpoint."""

    scope: Scope
    _receive: Receive
    _send: Send
    _settings: ServerSettings
    _count: Callable[[int], None]
    """Called with the status of the reply."""
    limit: ApiError | None = None
    """The error of the limit that the body has reached."""
    is_started: bool = False
    """True if the reply has begun."""
    _num_bytes: int = 0
    _is_read: asyncio.Event = field(default_factory=asyncio.Event)
    _watcher: asyncio.Task[None] | None = None
    _is_event_stream: bool = False
    _is_complete: bool = False
    _is_delivered: bool = False

    def __post_init__(self) -> None:
        self._files = self.scope[_FILES] = UndeliveredFiles()
        self._at_end = self.scope[_AT_END] = ExitStack()
        self._deadline = asyncio.get_running_loop().time() + self._settings.body_timeout

    # ---- methods that the endpoint calls

    async def receive(self) -> Message:
        """Return the next part of the request's body, within its limits."""
        if self._is_read.is_set():  # there is no limit on waiting for the client to disconnect
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
        """Send a part of the endpoint's reply, unless the gate answers instead."""
        if self.limit is None or self.is_started:
            await self._pass(message)

    # ---- methods that the gate calls

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancel the task in the block when the client disconnects before the last part of the
        reply is sent; the block then raises ClientDisconnect."""
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
            self._watcher = None  # otherwise its traceback and this object keep each other alive

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error."""
        await error.response()(self.scope, self._receive, self._pass)

    async def refuse_body(self, error: ApiError) -> None:
        """Answer with an error while the client still sends, then end the connection.

        The rest of the body is read and dropped for a while: an immediate close would discard an
        answer that the client has not read. But a client that waits for "100 Continue" sends none.
        """
        waits_to_send = self.limit is None and "expect" in Headers(scope=self.scope)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body" and not waits_to_send:
                await self._pass({**message, "more_body": True})
                await self._throw_away()
                message = {"type": "http.response.body"}
            await self._pass(message)

        response = error.response()
        response.headers["connection"] = "close"
        await response(self.scope, self._receive, send)

    async def cut_off(self, error: ApiError) -> None:
        """End the reply with an error: in a stream of events the last one, in another body that has
        begun the end of the connection, before all of its bytes are sent."""
        self._files.discard()
        if not self.is_started:
            await self.refuse(error)
        elif self._is_complete:
            return
        elif self._is_event_stream:
            event = f"data: {error.body().model_dump_json()}\n\n".encode()
            await self._pass({"type": "http.response.body", "body": event})
        else:
            connection_of(self.scope).transport.abort()
            await self._disconnected()

    def end(self) -> None:
        """End the exchange; remove the files of a reply that was not delivered."""
        self._at_end.close()
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
        """Send the last part of a reply that names files; once sent, they are the client's."""
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
        """Read the rest of the body, up to the limits of time and size."""
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def body_too_large(settings: ServerSettings) -> ApiError:
    """Return the error for a body above ``--max-body-bytes``."""
    return ApiError(
        413,
        f"The request body is longer than {settings.max_body_bytes} bytes, the most this server "
        "takes (--max-body-bytes)",
    )


class RequestGate:
    """The ASGI layer that the module describes; one instance per server."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, state: ServerState, paths: Sequence[str]
    ) -> None:
        self._app, self._settings, self._state = app, settings, state
        self._endpoints = [(compile_path(path)[0], path) for path in paths]
        self._keys = [key.encode() for key in settings.accepted_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def count(status: int) -> None:
            self._state.metrics.count_response(status, self._endpoint_of(scope))

        exchange = Exchange(scope, receive, send, self._settings, count)
        try:
            await self._answer(exchange)
        except ClientDisconnect:
            if not exchange.is_started:
                count(STATUS_CLIENT_GONE)
        except Exception:
            if not exchange.is_started:  # the application answers with 500, outside this layer
                count(500)
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
        """Return the reason to refuse a request before reading it, or None."""
        if self._keys and not self._has_key(headers):
            return ApiError(401, "This server requires a key: Authorization: Bearer KEY")
        if self._state.is_draining:
            return ApiError(503, "The server is shutting down; try another one, or try later")
        limit = self._settings.max_queued_requests
        if is_generation and self._state.load.total >= limit:
            return ApiError(
                429,
                f"{limit} requests are unfinished, the most this server accepts "
                "(--max-queued-requests); try again later",
            )
        return None

    def _endpoint_of(self, scope: Scope) -> str:
        """Return the path of the endpoint that a request is for, as it is declared.

        All other paths have one name together, because clients choose them.
        """
        path = endpoint_path(scope)
        found = (name for pattern, name in self._endpoints if pattern.match(path))
        return next(found, "(no endpoint)")

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key_text = headers.get("authorization", "").partition(" ")
        content = key_text.strip().encode("latin-1")
        # Every key is compared in full, so that the time taken says nothing about them.
        matches = [hmac.compare_digest(content, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _generate(self, exchange: Exchange) -> None:
        """Count the request and run :meth:`_pass_on`; cancel it, which aborts the request, when its
        time is over or its client disconnects."""
        with self._state.load.one():
            await self._pass_on_in_time(exchange)

    async def _pass_on_in_time(self, exchange: Exchange) -> None:
        seconds = self._settings.request_timeout
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

    async def _pass_on(self, exchange: Exchange) -> None:
        """Let the endpoint answer; ignore its error about a body that was cut off."""
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            if exchange.limit is None or exchange.is_started:
                raise


def endpoint_path(scope: Scope) -> str:
    """Return the path without the prefix under which a proxy serves it.

    uvicorn adds the prefix to every path. If the path had it already, one is removed.
    """
    root: str = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root)
    if root and f"{path}/".startswith(f"{root}/"):
        scope["path"] = path
        path = path.removeprefix(root)
    return path or "/"


def install_limits(
    app: FastAPI, settings: ServerSettings, state: ServerState, paths: Sequence[str] = ()
) -> None:
    """Put the gate and CORS before the endpoints of ``app``, whose paths are ``paths``."""
    app.add_middleware(RequestGate, settings=settings, state=state, paths=paths)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["ETag", "Content-Range", "Retry-After"],
    )
