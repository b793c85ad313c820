"""Clients that go away, and answers that come piece by piece (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import MEANT_FOR_CLIENTS, ClientGone, as_api_error
from vllm.entrypoints.openai.responses import encode
from vllm.logger import init_logger
from vllm.v1.engine.undelivered_files import UndeliveredFiles

logger = init_logger(__name__)

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class WhileConnected:
    """``async with``: the task inside is cancelled, and ends with ClientGone, when the client
    closes its connection.

    ``receive`` is the request's, whose body has been read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        del self._watcher, self._receive  # cycles, for the garbage collector
        if not self._is_gone:
            return
        was_ours = self._task.uncancel() <= self._num_cancelling
        if was_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientGone from error


class EventStream(Response):
    """Sends ``events``, which are complete ``data:`` blocks, and DONE; closes them when the
    client goes."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async with WhileConnected(receive):
                    await self._send_all(events, send)
            except ClientGone:
                return
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_all(self, events: AsyncIterator[bytes], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})


async def open_stream(
    make_events: Callable[[], AsyncGenerator[msgspec.Struct, None]], files: UndeliveredFiles
) -> EventStream:
    """The stream of ``make_events()``, once its first event is there; it names ``files``.

    So a request that is refused or fails before that is answered by a plain error: the
    exception is raised here. A later one becomes an event with the error's body.
    """
    events = make_events()
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_as_blocks(first, events, files))


async def _as_blocks(
    first: msgspec.Struct, rest: AsyncGenerator[msgspec.Struct, None], files: UndeliveredFiles
) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        try:
            yield data_block(first)
            async for event in rest:
                yield data_block(event)
        except Exception as error:  # the client is told: the status line is long gone
            if not isinstance(error, MEANT_FOR_CLIENTS):
                logger.exception("a stream failed")
            files.discard()
            yield data_block(as_api_error(error).body())


def data_block(event: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(event) + b"\n\n"


__all__ = ["EventStream", "WhileConnected", "open_stream"]
