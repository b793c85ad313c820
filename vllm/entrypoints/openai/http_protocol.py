"""uvicorn's HTTP protocol with protection from slow and endless heads, and with detection of
clients that are gone.

uvicorn waits for ever for a client that sends half a request line. Here such a client gets
408, and an idle one that never sent anything is disconnected. The head of a request arrives
before its key, so its size is limited (``--max-head-bytes``), and so is the memory of all
connections without a complete head: when it is full, the one that waits longest is disconnected.
uvicorn silently drops data for a client that has gone: :func:`connection_of` can tell. It answers
HTTP/1.0, which nginx speaks to servers by default, in chunks: here such a reply has none.

The parser is always httptools.
"""

from __future__ import annotations

import asyncio
import select
import sys
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

from starlette.types import Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm.entrypoints.openai.errors import ApiError

HEAD_SECONDS = 30.0
STRANGERS_BYTES = 64 * 2**20
"""Most bytes of all connections of this process without a complete first head."""
CONNECTION_BYTES = 32 * 2**10
"""Approximate memory of a connection that has sent nothing."""
_EXTENSION = "vllm.connection"
_HUNG_UP = select.POLLRDHUP if sys.platform == "linux" else 0  # POLLHUP comes unasked


def refusal(error: ApiError) -> bytes:
    """Return the whole response as bytes for the connection."""
    content = error.body().model_dump_json().encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


class CycleWithoutChunks(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks. A body whose length is not known before it is
    sent ends with the connection."""

    _is_endless = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.chunked_encoding = None if b"content-length" in names else False
            self._is_endless = self.chunked_encoding is False
        elif message["type"] == "http.response.body" and self._is_endless:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class PromptHeadProtocol(HttpToolsProtocol):
    """One connection."""

    max_head_bytes = 64 * 2**10
    """Most bytes of a request line with its headers, and of trailers."""
    _strangers: ClassVar[dict[PromptHeadProtocol, int]] = {}
    """Connections without a complete first head, and the bytes they take; oldest first."""
    _reads_head = True
    """True if the next bytes are not part of a body."""
    _is_in_head = False
    """True if a head has begun and is not complete."""
    _head_bytes = 0
    """Bytes received of the current head, or of the trailers."""
    _head_timer: asyncio.TimerHandle | None = None
    _last_words = b""
    """Response to send before the connection is closed."""
    _has_bytes = False
    """True if the client has sent something."""
    _is_lost = False
    _loss: Exception | None = None
    """The error that ended the connection; None if either side closed it."""
    on_end: Callable[[], None] | None = None
    """Called when the connection has ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        while data and not self.transport.is_closing() and not self._last_words:
            if not self._reads_head:
                super().data_received(data)
                return
            room = self.max_head_bytes - self._head_bytes
            part, data = data[:room], data[room:]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._reads_head and self._head_bytes >= self.max_head_bytes:
                self._refuse_head()
            elif self._is_in_head:  # more of it is to come
                self._make_room()

    def _refuse_head(self) -> None:
        """Refuse a head or trailers that are too long."""
        if self.transport.is_closing() or self._last_words:
            return
        is_url = self._is_in_head and len(self.url) > self.max_head_bytes // 2
        status, what = (414, "address") if is_url else (431, "head")
        message = (
            f"The {what} of the request is longer than {self.max_head_bytes} bytes, the most this "
            "server takes (--max-head-bytes)"
        )
        self._refuse(ApiError(status, message))

    def _refuse(self, error: ApiError) -> None:
        """End the connection with this error, behind the reply to the previous request."""
        self._last_words = refusal(error)
        if self.cycle is None or self.cycle.response_complete:
            self._say_last_words()
        elif self._reads_head:
            self.flow.pause_reading()
        elif not self.cycle.response_started:
            self._say_last_words()
        else:
            self.transport.close()

    def _say_last_words(self) -> None:
        self.transport.write(self._last_words)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_words and not self.transport.is_closing():
            self._say_last_words()

    def _make_room(self) -> None:
        """Count this connection; disconnect those that wait longest while there are too many."""
        strangers = self._strangers
        strangers[self] = CONNECTION_BYTES + self._head_bytes
        # The exact sum is computed only if it may exceed the limit, not for each connection.
        while len(strangers) * CONNECTION_BYTES > STRANGERS_BYTES or (
            len(strangers) * (CONNECTION_BYTES + self.max_head_bytes) > STRANGERS_BYTES
            and sum(strangers.values()) > STRANGERS_BYTES
        ):
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest._end_slow_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if not self._reads_head:
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        # A weak reference: a cycle would keep every request until the next garbage collection.
        self.scope["extensions"] = {_EXTENSION: weakref.proxy(self)}
        self._start_head_timer()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._reads_head, self._is_in_head, self._head_bytes = False, False, 0
        self._strangers.pop(self, None)
        if self.parser.should_upgrade() and self._has_body():
            upgrade = (self._get_upgrade() or b"").decode("latin-1")
            message = (
                f"Upgrade: {upgrade!r}: has to be left out of a request with a body (HTTP/1.1)"
            )
            self._reads_head = True  # nothing of this request has a reply yet
            self._refuse(ApiError(400, message))
        else:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0" and self.cycle is not None:
                self.cycle.__class__ = CycleWithoutChunks  # uvicorn names its own

    def _has_body(self) -> bool:
        """Return whether the head says so. Behind an upgrade, the parser reads no body."""
        lengths = (b"content-length", b"transfer-encoding")
        return any(name in lengths and value != b"0" for name, value in self.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._strangers.pop(self, None)
        self._loss = exc
        self._is_lost = True
        super().connection_lost(exc)
        if self.on_end is not None:
            self.on_end()

    def has_client(self) -> bool:
        """Return whether the client is still connected, as far as this machine knows."""
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HUNG_UP)
        return not poll.poll(0)

    async def flushed(self) -> bool:
        """Wait until all written data has gone to the socket; False if the client went first.

        If the wait is cancelled, the rest is not sent. Under TLS, encrypted data count as sent,
        because there is no way to see how much of them still waits.
        """
        try:
            while self.transport.get_write_buffer_size() and not self._is_lost:
                self.transport.set_write_buffer_limits(0)  # writing pauses until all is gone
                await self.flow.drain()
            await asyncio.sleep(0)  # a write that failed is reported by now
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits()
        return self._loss is None

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        loop: Any = self.loop
        self._head_timer = loop.call_later(HEAD_SECONDS, self._end_slow_head)

    def _stop_head_timer(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _end_slow_head(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # the reply to the previous request is not complete
            return
        if self._has_bytes:
            message = f"The head of the request was not complete after {HEAD_SECONDS:g} s"
            self.transport.write(refusal(ApiError(408, message)))
        self.transport.close()


def limited_protocol(max_head_bytes: int) -> type[PromptHeadProtocol]:
    """Return the protocol class with this limit; uvicorn creates its instances."""
    return type("LimitedProtocol", (PromptHeadProtocol,), {"max_head_bytes": max_head_bytes})


def connection_of(scope: Scope) -> PromptHeadProtocol:
    """Return the connection of a request."""
    connection: PromptHeadProtocol = scope["extensions"][_EXTENSION]
    return connection
