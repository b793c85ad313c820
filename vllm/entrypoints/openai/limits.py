"""What stands between the network and the endpoints: keys, sizes, times, numbers.

Two pure ASGI layers, outermost first: CORS (Starlette's), then :class:`RequestGate`. The
gate counts responses, asks for the key, turns requests away while the server ends or is
full, bounds the size of a body and the time it may take, and the time of a generation.
Nothing of a body is kept here.

When a limit is reached after the endpoint began to read, the endpoint sees a client that
went away, and the gate answers in its place.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.entrypoints.openai.state import ServerState

OPEN_PATHS = {
    *("/", "/health", "/ping", "/version", "/load", "/metrics", "/metrics/"),
    *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
}
"""Paths that answer without a key, and while the server drains."""
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""POST requests that are admitted, counted for ``/load``, and timed."""
RETRY_AFTER_SECONDS = 1
"""When a client that was turned away may come back."""
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * 2**20
"""How long, and how far, a body is thrown away so that its client can read the refusal."""
_CLOSE = (b"connection", b"close")


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy adds."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def header(scope: Scope, name: bytes) -> bytes | None:
    """Value of the first header of that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


class Responder:
    """``send`` of one request: knows how far the response is, and can put an error in its place.

    ``count`` gets the status of the response.
    """

    def __init__(self, send: Send, count: Callable[[int], None]) -> None:
        self._send = send
        self._count = count
        self.is_started = False
        self._is_complete = False
        self._is_event_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            self._is_event_stream = any(
                key.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for key, value in message["headers"]
            )
            self._count(message["status"])
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def refuse(
        self, refusal: ApiError, *headers: tuple[bytes, bytes], linger: Receive | None = None
    ) -> None:
        """Answer with an error.

        ``linger``: the client still sends. What comes is thrown away for a while, then the
        connection ends: closing at once would take the answer away from who has not read it.
        """
        content = msgspec.json.encode(refusal.body())
        fields = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *headers,
        ]
        if refusal.status in (429, 503):
            fields.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
        await self({"type": "http.response.start", "status": refusal.status, "headers": fields})
        if linger is not None:
            await self({"type": "http.response.body", "body": content, "more_body": True})
            await _throw_away(linger)
            content = b""
        await self({"type": "http.response.body", "body": content})

    async def cut_off(self, refusal: ApiError) -> None:
        """End whatever there is: with an error, or with one as the last event of a stream."""
        if not self.is_started:
            await self.refuse(refusal)
        elif not self._is_complete:
            event = b"data: " + msgspec.json.encode(refusal.body()) + b"\n\n"
            last = event if self._is_event_stream else b""
            await self({"type": "http.response.body", "body": last})


async def _throw_away(receive: Receive) -> None:
    """Read the rest of a body, as far as there is patience."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class BodyReader:
    """``receive`` of one request, with limits on what comes through it."""

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive = receive
        self._settings = settings
        self._deadline = asyncio.get_running_loop().time() + settings.body_timeout
        self._num_bytes = 0
        self._is_complete = False
        self.refusal: ApiError | None = None
        """The limit that was reached."""

    async def __call__(self) -> Message:
        if self._is_complete:  # waiting for the client to go away may take as long as it likes
            return await self._receive()
        if self.refusal is None:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._receive()
            except TimeoutError:
                seconds = self._settings.body_timeout
                self.refusal = ApiError(
                    408, f"The request body was not complete after {seconds:g} s (--body-timeout)"
                )
            else:
                self._num_bytes += len(message.get("body", b""))
                if self._num_bytes <= self._settings.max_body_bytes:
                    self._is_complete = not message.get("more_body", False)
                    return message
                self.refusal = body_too_large(self._settings)
        return {"type": "http.disconnect"}


def body_too_large(settings: ServerSettings) -> ApiError:
    return ApiError(
        413,
        f"The request body is longer than {settings.max_body_bytes} bytes, the most this server "
        "takes (--max-body-bytes)",
    )


class RequestGate:
    """See the module. One object a server."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, state: ServerState) -> None:
        self._app = app
        self._settings = settings
        self._state = state
        self._keys = [key.encode() for key in settings.accepted_keys]
        self._count_response: Callable[[int], None] = (
            state.metrics.count_response if state.metrics is not None else lambda status: None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        response = Responder(send, self._count_response)
        is_generation = scope["method"] == "POST" and path in GENERATION_PATHS
        try:
            if (refusal := self._refusal(scope, path, is_generation)) is not None:
                challenge = ((b"www-authenticate", b"Bearer"),) if refusal.status == 401 else ()
                await response.refuse(refusal, *challenge)
            elif int(header(scope, b"content-length") or 0) > self._settings.max_body_bytes:
                # A client that waits for leave to send the body will send none.
                linger = None if header(scope, b"expect") is not None else receive
                await response.refuse(body_too_large(self._settings), _CLOSE, linger=linger)
            else:
                pass_on = self._generate if is_generation else self._pass_on
                refusal = await pass_on(scope, receive, response)
                if refusal is not None and not response.is_started:
                    await response.refuse(refusal, _CLOSE, linger=receive)
        except Exception:
            if not response.is_started:  # the application answers with 500, outside of this
                self._count_response(500)
            raise

    def _refusal(self, scope: Scope, path: str, is_generation: bool) -> ApiError | None:
        """Why this request is not even read; None: it is."""
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        if self._keys and not self._has_key(scope):
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

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        given = given.strip()
        # Every key is compared in full, so that the time taken says nothing about them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _generate(
        self, scope: Scope, receive: Receive, response: Responder
    ) -> ApiError | None:
        """As :meth:`_pass_on`, counted; cancelled, hence aborted, when its time is over."""
        self._state.server_load += 1
        deadline = asyncio.timeout(self._settings.request_timeout)
        try:
            async with deadline:
                return await self._pass_on(scope, receive, response)
        except TimeoutError:
            if not deadline.expired():
                raise
            message = (
                f"The request was not complete after {self._settings.request_timeout:g} s and was "
                "aborted (--request-timeout)"
            )
            await response.cut_off(ApiError(504, message))
            return None
        finally:
            self._state.server_load -= 1

    async def _pass_on(
        self, scope: Scope, receive: Receive, response: Responder
    ) -> ApiError | None:
        """Let the endpoint answer; returns the limit that its request's body reached."""
        reader = BodyReader(receive, self._settings)

        async def send(message: Message) -> None:
            if reader.refusal is None or response.is_started:
                await response(message)

        try:
            await self._app(scope, reader, send)
        except Exception:
            if reader.refusal is None or response.is_started:
                raise
        return reader.refusal


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
