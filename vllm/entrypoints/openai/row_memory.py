"""The limit on the bytes of rows that the server holds for all requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from typing import NamedTuple

from vllm.entrypoints.openai.errors import ApiError

WAIT_SECONDS = 60.0


class _Waiter(NamedTuple):
    num_bytes: int
    granted: asyncio.Future[None]


class RowMemory:
    """Memory that requests reserve before they run; those that find too little wait in turn."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes that are reserved."""
        self._waiters: deque[_Waiter] = deque()

    async def reserve(self, num_bytes: int, until: ExitStack) -> None:
        """Wait for memory, which is free again when ``until`` is closed.

        A request that needs more than there is runs alone. ApiError: it waited too long.
        """
        num_bytes = min(num_bytes, self._most_bytes)
        waiter = _Waiter(num_bytes, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await asyncio.shield(waiter.granted)
        except BaseException as error:
            if waiter.granted.done():
                self._release(num_bytes)
            else:
                self._waiters.remove(waiter)
                self._grant()
            if not isinstance(error, TimeoutError):
                raise
            raise ApiError(
                503,
                "The rows of running requests take the memory that this server has for them "
                f"({self._most_bytes >> 20} MiB, --max-total-hidden-states-mib); try again later, "
                "or ask for less",
            ) from None
        until.callback(self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.num_bytes + self._waiters[0].num_bytes <= self._most_bytes:
            waiter = self._waiters.popleft()
            self.num_bytes += waiter.num_bytes
            waiter.granted.set_result(None)
