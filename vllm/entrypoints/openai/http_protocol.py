"""uvicorn's HTTP protocol, with a bound on the time that a request's head may take.

uvicorn waits for ever for a client that sends half a request line. Here such a client gets
408, and an idle one that never sent anything is hung up on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.entrypoints.openai.errors import ApiError

HEAD_SECONDS = 30.0


def head_too_slow() -> bytes:
    """The whole response, as it goes over the wire."""
    message = f"The head of the request was not complete after {HEAD_SECONDS:g} s"
    content = msgspec.json.encode(ApiError(408, message, type="RequestTimeoutError").body())
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

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


__all__ = ["PromptHeadProtocol"]
