"""An engine on an event loop of its own thread, and a queue between that loop and a caller.

    event loop, thread "extraction"                     caller's thread
      AsyncLLM -> samples -> SampleQueue (bounded) ->     iterate()

The forward passes run in the engine's own process.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from vllm.hidden_states.sample import FailedSample, HiddenStatesSample
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

Item = HiddenStatesSample | FailedSample
_CLOSED = "the engine was shut down while its samples were read; begin another iteration"


class SampleQueue:
    """Samples on their way from an event loop to another thread, bounded by their bytes.

    A sample that alone exceeds the bound may enter while the queue is empty.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._end: BaseException | None = None
        self._room: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def put(self, item: Item) -> None:
        """Wait for room, then add an item."""
        size = _size_of(item)
        while not self._add(item, size):
            await self._room.wait()

    def _add(self, item: Item, size: int) -> bool:
        with self._changed:
            if self._items and self._num_bytes + size > self._most_bytes:
                self._room.clear()
                return False
            self._items.append(item)
            self._num_bytes += size
            self._changed.notify()
            return True

    def end(self, reason: BaseException) -> None:
        """End the queue: :meth:`get` raises this after the last item."""
        with self._changed:
            self._end = reason
            self._changed.notify()

    def get(self) -> Item:
        """Wait for the next item and take it; raises what :meth:`end` was given."""
        with self._changed:
            while not self._items:
                if self._end is not None:
                    raise self._end
                self._changed.wait()
            item = self._items.popleft()
            self._num_bytes -= _size_of(item)
            self._loop.call_soon_threadsafe(self._room.set)
        return item


def _size_of(item: Item) -> int:
    return item.nbytes if isinstance(item, HiddenStatesSample) else 0


class _Exhausted(Exception):
    """The source has no more items."""


class BackgroundEngine:
    """The engine and its loop, from the first use to :meth:`close`.

    ValueError: the arguments cannot be served. EngineDeadError: the engine could not start.
    """

    def __init__(self, engine_args: AsyncEngineArgs) -> None:
        self.llm = AsyncLLM.from_engine_args(engine_args)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="extraction", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self.llm, self._loop, thread)
        try:
            self._run(self.llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine's process and the thread; may be called again."""
        self._end()

    def iterate(
        self,
        source: Callable[[], AsyncGenerator[Item, None]],
        most_bytes: int,
        on_wait: Callable[[float], None],
    ) -> Generator[Item, None, None]:
        """Yield what ``source`` yields on the loop, which runs ahead by ``most_bytes``.

        on_wait: gets the seconds that each item after the first was waited for. Leaving the
        iteration ends the source.
        """
        queue, task = self._run(_start(source, most_bytes))
        try:
            item = queue.get()
            while True:
                yield item
                if not self._end.alive:
                    raise EngineDeadError(_CLOSED)
                start = time.perf_counter()
                item = queue.get()
                on_wait(time.perf_counter() - start)
        except _Exhausted:
            return
        finally:
            if self._end.alive:  # otherwise close() cancels it, and this call with it
                with suppress(CancelledError):
                    self._run(_cancel(task))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _start(
    source: Callable[[], AsyncGenerator[Item, None]], most_bytes: int
) -> tuple[SampleQueue, asyncio.Task[None]]:
    queue = SampleQueue(most_bytes)
    return queue, asyncio.create_task(_fill(queue, source))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _fill(queue: SampleQueue, source: Callable[[], AsyncGenerator[Item, None]]) -> None:
    try:
        async with aclosing(source()) as items:
            async for item in items:
                await queue.put(item)
    except asyncio.CancelledError:
        queue.end(EngineDeadError(_CLOSED))
        raise
    except BaseException as error:
        queue.end(error)
    else:
        queue.end(_Exhausted())


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(_shut_down(llm), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _shut_down(llm: AsyncLLM) -> None:
    """End everything on this loop: an interrupt leaves the start of the engine under way."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await llm.shutdown()
