"""Threads that tokenise: long inputs leave one of them to short ones."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from vllm.v1.engine.renderer_threads import LONG_BYTES, RendererThreads

SECONDS = 60


def test_a_long_input_never_takes_the_last_thread() -> None:
    begun, go_on = [threading.Event() for _ in range(3)], threading.Event()

    def work(number: int) -> int:
        begun[number].set()
        assert go_on.wait(SECONDS)
        return number

    async def run() -> None:
        threads = RendererThreads(2)
        long = [
            asyncio.create_task(threads.run(LONG_BYTES + 1, work, number)) for number in range(3)
        ]
        await asyncio.to_thread(begun[0].wait, SECONDS)
        long[0].cancel()  # its client is gone, but the thread still works
        with suppress(asyncio.CancelledError):
            await long[0]
        async with asyncio.timeout(SECONDS):
            assert await threads.run(LONG_BYTES, lambda: "short") == "short"
        assert not begun[1].is_set()
        go_on.set()
        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*long[1:]) == [1, 2]
        threads.shutdown()

    asyncio.run(run())


def test_one_thread_takes_all() -> None:
    async def run() -> None:
        threads = RendererThreads(1)
        async with asyncio.timeout(SECONDS):
            assert await threads.run(LONG_BYTES + 1, lambda: 1) == 1
            assert await threads.run(0, lambda: 2) == 2
        threads.shutdown()

    asyncio.run(run())
