"""Requests on the engine: to their end, or as they come; nothing of abandoned ones is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from vllm.entrypoints.openai.errors import failed
from vllm.entrypoints.openai.state import EngineClient
from vllm.outputs import RequestOutput
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.undelivered_files import UndeliveredFiles

MAX_EVENTS_WAITING = 64
"""Outputs that wait for a slow client, when a stream has several prompts."""


async def finish_all(
    engine: EngineClient, requests: Sequence[ProcessedInput], files: UndeliveredFiles
) -> list[RequestOutput]:
    """The complete outputs of ``requests``, in their order; their files are added to ``files``.

    When one fails, or the caller is cancelled, the others are aborted.

    Raises:
        ApiError: a request failed (500), or had no room for its file (507).
    """
    async with aclosing(stream_all(engine, requests, files)) as outputs:
        ended = {index: output async for index, output in outputs if output.finished}
    return [ended[index] for index in range(len(requests))]


async def _run(
    engine: EngineClient, request: ProcessedInput, files: UndeliveredFiles
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one request. ApiError, with the engine's reason: it failed."""
    async with aclosing(engine.run(request)) as outputs:
        async for output in outputs:
            for completion in output.outputs:
                files.add(completion.kv_transfer_params)
            for completion in output.outputs:
                if completion.failure is not None:
                    raise failed(completion.failure)
            yield output


async def stream_all(
    engine: EngineClient, requests: Sequence[ProcessedInput], files: UndeliveredFiles
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the request, what is new of it), as it comes, until all have ended.

    Leaving the iteration aborts what has not ended. ``files``, and errors: :func:`finish_all`.
    """
    if len(requests) == 1:
        async with aclosing(_run(engine, requests[0], files)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    events: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(MAX_EVENTS_WAITING)
    tasks = [
        asyncio.create_task(_pump(_run(engine, request, files), index, events))
        for index, request in enumerate(requests)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            index, event = await events.get()
            if isinstance(event, Exception):
                raise event
            num_running -= event.finished
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    run: AsyncGenerator[RequestOutput, None],
    index: int,
    events: asyncio.Queue[tuple[int, RequestOutput | Exception]],
) -> None:
    try:
        async with aclosing(run) as outputs:
            async for output in outputs:
                await events.put((index, output))
    except Exception as error:  # reaches the client through the queue
        await events.put((index, error))
