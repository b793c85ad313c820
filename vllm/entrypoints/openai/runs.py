"""Requests on the engine: to their end, or as they come; nothing of abandoned ones is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from vllm.entrypoints.openai.errors import request_failed
from vllm.entrypoints.openai.state import EngineClient
from vllm.outputs import RequestOutput
from vllm.v1.engine.input_processor import ProcessedInput

MAX_EVENTS_WAITING = 64
"""Outputs that wait for a slow client, when a stream has several prompts."""


async def finish_all(
    engine: EngineClient, requests: Sequence[ProcessedInput]
) -> list[RequestOutput]:
    """The complete outputs of ``requests``, in their order.

    When one fails, or the caller is cancelled, the others are aborted and the files of those
    that had ended are removed.

    Raises:
        ApiError: a request failed (500), or had no room for its file (507).
    """
    ended: list[RequestOutput] = []
    try:
        if len(requests) == 1:
            outputs = [await _finish(engine, requests[0], ended)]
        else:
            outputs = await _finish_together(engine, requests, ended)
        await asyncio.sleep(0)  # a client that has just gone is noticed before it is answered
        return outputs
    except BaseException:
        discard_files(ended)
        raise


async def _finish_together(
    engine: EngineClient, requests: Sequence[ProcessedInput], ended: list[RequestOutput]
) -> list[RequestOutput]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_finish(engine, one, ended)) for one in requests]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _finish(
    engine: EngineClient, request: ProcessedInput, ended: list[RequestOutput]
) -> RequestOutput:
    """The complete output of one request, which is added to ``ended``."""
    async with aclosing(engine.run(request)) as outputs:
        async for output in outputs:
            if output.finished:
                ended.append(output)
                check_succeeded(output)
                return output
    raise AssertionError("the engine's outputs ended before the request did")


async def stream_all(
    engine: EngineClient, requests: Sequence[ProcessedInput]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the request, what is new of it), as it comes, until all have ended.

    Leaving the iteration aborts what has not ended. Raises as :func:`finish_all`.
    """
    if len(requests) == 1:
        async with aclosing(engine.run(requests[0])) as outputs:
            async for output in outputs:
                check_succeeded(output)
                yield 0, output
        return
    events: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(MAX_EVENTS_WAITING)
    tasks = [
        asyncio.create_task(_pump(engine, request, index, events))
        for index, request in enumerate(requests)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            index, event = await events.get()
            if isinstance(event, Exception):
                raise event
            check_succeeded(event)
            num_running -= event.finished
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: EngineClient,
    request: ProcessedInput,
    index: int,
    events: asyncio.Queue[tuple[int, RequestOutput | Exception]],
) -> None:
    try:
        async with aclosing(engine.run(request)) as outputs:
            async for output in outputs:
                await events.put((index, output))
    except Exception as error:  # reaches the client through the queue
        await events.put((index, error))


def check_succeeded(output: RequestOutput) -> None:
    """ApiError with the engine's reason when a continuation ended with an error."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise request_failed(str(completion.stop_reason))


def discard_files(outputs: Sequence[RequestOutput]) -> None:
    """Remove hidden-state files whose path no client will learn."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
    )

    for output in outputs:
        for completion in output.outputs:
            path = (completion.kv_transfer_params or {}).get("hidden_states_path")
            if isinstance(path, str):
                cleanup_hidden_states(path)


__all__ = ["check_succeeded", "discard_files", "finish_all", "stream_all"]
