"""Outputs of a request on their way from the engine core to the caller's task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind


class UndeliveredFiles:
    """Hidden-state files whose paths are not delivered yet; false when there are none."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """Add the file of a request that has ended, if it has one."""
        path = (kv_transfer_params or {}).get("hidden_states_path")
        if isinstance(path, str):
            self._paths.append(path)

    def discard(self) -> None:
        """Remove the files and their locks: their paths will not be delivered."""
        paths, self._paths = self._paths, []
        for path in paths:
            cleanup_hidden_states(path)


class RequestStream:
    """Outputs of one request on their way to its caller.

    A caller that is slower than the engine gets the cumulative outputs of several steps
    merged into one, and so always the newest ones.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._outputs: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self._completions: dict[int, CompletionOutput] = {}
        """The last output of each continuation, if they are cumulative and so contain all."""
        self.files = UndeliveredFiles()
        """Files of continuations that have ended; they are the caller's once all have ended."""

    def put(self, item: RequestOutput | BaseException) -> None:
        self._outputs.put_nowait(item)

    async def get(self) -> RequestOutput:
        """Return the next output, or raise the error that ended the request."""
        while True:
            item = await self._outputs.get()
            if isinstance(item, BaseException):
                raise item
            if self._kind is not RequestOutputKind.CUMULATIVE:
                return item
            self._completions |= {one.index: one for one in item.outputs}
            if self._outputs.empty():
                item.outputs = [self._completions[index] for index in sorted(self._completions)]
                return item
