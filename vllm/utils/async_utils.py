"""Merging of async iterators, and calls that block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
MAX_WAITING = 64
"""Most items that wait for a slow consumer."""


async def merge_async_iterators(
    iterators: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the iterator, item) as items arrive, until all iterators have ended.

    An exception of one iterator is raised here. Leaving the iteration closes them all.
    """
    if len(iterators) == 1:
        async with aclosing(iterators[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(MAX_WAITING)

    async def pump(index: int) -> None:
        try:
            async with aclosing(iterators[index]) as items:
                async for item in items:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as error:  # reaches the consumer through the queue
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(iterators))]
    try:
        num_running = len(tasks)
        while num_running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def call_in_thread(function: Callable[[float], T], seconds: float) -> T:
    """Call ``function`` beside the loop, or in it at the end of the interpreter, when no thread
    can be started any more: an engine that nobody has closed ends only then."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, function, seconds)
    except RuntimeError:
        return function(seconds)
    return await call
