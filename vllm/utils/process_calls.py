"""Calls of functions of another process of this machine, over Unix sockets, for asyncio.

Each call has a connection of its own. The caller sends the function's name and arguments, and gets
the result or the exception. A *conversation* is a function that gets the connection itself: it may
send many objects, and learns when the caller has gone. Objects are pickled, so a socket has to be
in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from vllm.logger import init_logger

logger = init_logger(__name__)

_LENGTH_BYTES = 8


class CallConnection:
    """One end of the connection of a call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, value: object) -> None:
        """Send an object; waits while the other end is slow. ConnectionError: it has gone."""
        content = pickle.dumps(value)
        self._writer.write(len(content).to_bytes(_LENGTH_BYTES) + content)
        await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next object. EOFError or ConnectionError: the other end has gone."""
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
        return pickle.loads(await self._reader.readexactly(length))

    async def gone(self) -> None:
        """Wait until the other end, which sends nothing more, has closed the connection."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()

    def close(self) -> None:
        self._writer.close()


class _Ended(NamedTuple):
    """The end of a call."""

    result: Any = None
    error: Exception | None = None


async def converse(path: str, name: str, *arguments: object) -> CallConnection:
    """Begin a conversation with a function of the process that listens at a path.

    OSError: no process listens there.
    """
    connection = CallConnection(*await asyncio.open_unix_connection(path))
    try:
        await connection.send((name, arguments))
    except BaseException:
        connection.close()
        raise
    return connection


async def call(path: str, name: str, *arguments: object) -> Any:
    """Call a function there, and return its result or raise its exception.

    OSError or EOFError: the process has gone.
    """
    connection = await converse(path, name, *arguments)
    try:
        ended: _Ended = await connection.receive()
    finally:
        connection.close()
    if ended.error is not None:
        raise ended.error
    return ended.result


class CallServer:
    """Answers calls of other processes at a path, by functions of these names."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Awaitable[Any]]],
        conversations: Mapping[str, Callable[..., Awaitable[None]]] = {},
    ) -> None:
        """conversations: functions that get the connection before the arguments."""
        self._functions, self._conversations = functions, conversations
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Stop listening, and end the calls under way."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = CallConnection(reader, writer)
        try:
            name, arguments = await connection.receive()
            if name in self._conversations:
                await self._conversations[name](connection, *arguments)
                return
            try:
                ended = _Ended(await self._functions[name](*arguments))
            except Exception as error:
                ended = _Ended(error=error)
            await connection.send(ended)
        except (EOFError, ConnectionError):
            logger.debug("the caller has gone")
        except Exception:
            logger.exception("a call of another process failed")
        finally:
            connection.close()
            self._tasks.discard(task)
