"""uvicorn's HTTP protocol, with what it leaves open: slow heads, and clients that are gone.

uvicorn waits for ever for a client that sends half a request line. Here such a client gets
408, and an idle one that never sent anything is hung up on. What is sent to a client that
has gone, uvicorn throws away without a word: :func:`connection_of` tells.
"""

from __future__ import annotations

import asyncio
import select
import sys
import weakref
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.entrypoints.openai.errors import ApiError

HEAD_SECONDS = 30.0
_EXTENSION = "vllm.connection"
_HUNG_UP = select.POLLRDHUP if sys.platform == "linux" else 0  # POLLHUP comes unasked


def head_too_slow() -> bytes:
    """The whole response, as it goes over the wire."""
    message = f"The head of the request was not complete after {HEAD_SECONDS:g} s"
    content = ApiError(408, message).body().model_dump_json().encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


class PromptHeadProtocol(HttpToolsProtocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _has_bytes = False
    """Some of the head has come."""
    _is_lost = False
    _loss: Exception | None = None
    """Why the connection ended, unless either side just closed it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Weak: a cycle would keep every request until the garbage collector comes by.
        self.scope["extensions"] = {_EXTENSION: weakref.proxy(self)}
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._loss = exc
        self._is_lost = True
        super().connection_lost(exc)

    def has_client(self) -> bool:
        """Whether somebody still listens, as far as this machine knows by now."""
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HUNG_UP)
        return not poll.poll(0)

    async def flushed(self) -> bool:
        """Wait until all that was written has gone to the socket; False: the client went first.

        When the waiting is cancelled, the rest is not sent any more. Under TLS what is encrypted
        counts as gone: nobody can see how much of it still waits.
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
            self._start_head_timer()  # the reply to the request before it is still under way
            return
        if self._has_bytes:
            self.transport.write(head_too_slow())
        self.transport.close()


def connection_of(scope: Scope) -> PromptHeadProtocol:
    """The connection that a request came over."""
    connection: PromptHeadProtocol = scope["extensions"][_EXTENSION]
    return connection
