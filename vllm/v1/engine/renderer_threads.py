"""Threads that tokenise and render: a long text never takes the last free one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LONG_BYTES = 2**16
"""Inputs above this size are long: tokenising them takes more than about a tenth of a second."""


class RendererThreads:
    """A pool for one event loop, in which all threads but one may work on long inputs."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="renderer")
        self._room_for_long = asyncio.Semaphore(max(1, num_threads - 1))

    async def run(self, num_bytes: int, function: Callable[..., T], *arguments: object) -> T:
        """Call ``function(*arguments)`` on a thread. ``num_bytes``: size of its input."""
        if num_bytes <= LONG_BYTES:
            return await asyncio.wrap_future(self._threads.submit(function, *arguments))
        loop = asyncio.get_running_loop()
        await self._room_for_long.acquire()

        def end(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._room_for_long.release)

        try:
            future = self._threads.submit(function, *arguments)
        except BaseException:
            self._room_for_long.release()
            raise
        # Not when this coroutine ends: after a cancellation the thread still works.
        future.add_done_callback(end)
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """Drop what waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
