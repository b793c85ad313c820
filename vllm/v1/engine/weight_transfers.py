"""Weights that a trainer sends to an engine that runs: from the first call of it to the last.

An update is open from its start to its end, and no request begins meanwhile. It ends by
``finish``, when all weights were replaced (vLLM's clients say more than TRL's, whose first tensor
starts an update), when a transfer fails, or when the trainer is silent for too long.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from vllm.exceptions import FailureError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import Announced, GroupPlace
    from vllm.v1.engine.worker_calls import AsyncWorkerCalls

logger = init_logger(__name__)

_JOIN_POLL_SECONDS = 0.02


class WeightTransfers:
    """The updates of one engine, one at a time."""

    def __init__(self, engine: AsyncWorkerCalls, *, uses_nccl: bool, timeout: float) -> None:
        self._engine, self._uses_nccl, self._timeout = engine, uses_nccl, timeout
        self._calls = asyncio.Lock()
        self._update: AsyncExitStack | None = None
        """The end of the open update."""
        self._was_started = False
        self._receiving: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def join(self, place: GroupPlace) -> None:
        """Begin to join the group of a trainer. ValueError: another group is meeting."""
        async with self._calls:
            await self._call("join", place, self._uses_nccl, self._timeout)

    async def wait_for_group(self) -> None:
        """Wait until the group has met. FailureError: it did not."""
        while not await self._call("has_joined"):
            await asyncio.sleep(_JOIN_POLL_SECONDS)

    async def leave(self) -> None:
        """Leave the group, and finish an open update."""
        async with self._calls:
            try:
                await self._settle()
            finally:
                await self._close()
                await self._call("leave")

    async def start(self) -> None:
        """Start an update: requests under way are completed, and new ones wait."""
        async with self._calls:
            await self._settle()
            await self._open()
            self._was_started = True

    async def finish(self, *, only_announced: bool = False) -> None:
        """End an update, if one is open, whether or not it replaced all weights.

        only_announced: unless :meth:`start` started it.
        """
        async with self._calls:
            if self._was_started and only_announced:
                return
            try:
                await self._settle()
            finally:
                await self._close()

    async def receive(self, announced: Announced) -> None:
        """Receive tensors; without an open update, they are one.

        ValueError: they do not fit. FailureError: the trainer did not send them.
        """
        async with self._calls:
            await self._settle()
            ends = self._update is None
            await self._open()
            await self._receive(announced, ends=ends)

    async def announce(self, announced: Announced) -> None:
        """Check tensors, and receive them after this call has ended; a failure of that is raised
        by the next call. ValueError: they do not fit."""
        async with self._calls:
            await self._settle()
            was_open = self._update is not None
            await self._open()
            try:
                await self._call("check", announced)
            except ValueError:
                if not was_open:
                    await self._close()
                raise
            self._receiving = asyncio.create_task(self._receive(announced))

    async def load_folder(self, path: str) -> None:
        """Replace all weights by those of a folder. ValueError: they do not fit."""
        async with self._calls:
            await self._settle()
            if self._update is None:
                await self._engine.update_weights(path)
            else:
                await self._engine.collective_rpc("reload_weights", args=(path,))

    # ---- an update

    async def _call(self, step: str, *args: Any) -> Any:
        return (await self._engine.collective_rpc("transfer_weights", args=(step, *args)))[0]

    async def _open(self) -> None:
        if self._update is None:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._engine.weight_update())
                self._update = stack.pop_all()
        self._wait_for_trainer()

    async def _close(self) -> None:
        self._stop_waiting()
        update, self._update, self._was_started = self._update, None, False
        if update is not None:
            await update.aclose()

    async def _receive(self, announced: Announced, *, ends: bool | None = None) -> None:
        """Receive tensors. ends: the update ends with them; None: it does if it is whole."""
        self._stop_waiting()
        try:
            is_whole = await self._call("receive", announced, self._timeout)
        except BaseException as error:
            logger.error("an update of the weights ends: %s", error)
            await self._close()
            raise
        if is_whole if ends is None else ends:
            await self._close()
        else:
            self._wait_for_trainer()

    async def _settle(self) -> None:
        """Wait for the tensors that were announced last, and raise what went wrong."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            await asyncio.shield(receiving)

    # ---- a trainer that has gone

    def _wait_for_trainer(self) -> None:
        self._stop_waiting()
        loop = asyncio.get_running_loop()

        def expire() -> None:
            self._expiring = loop.create_task(self._expire(silence))

        self._silence = silence = loop.call_later(self._timeout, expire)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _expire(self, silence: asyncio.TimerHandle) -> None:
        async with self._calls:
            if self._silence is not silence:  # a call came first
                return
            reason = f"the trainer sent nothing for {self._timeout:g} s"
            logger.error("an update of the weights ends: %s", reason)
            try:
                await self._call("interrupt", reason)
            except (ValueError, RuntimeError, FailureError):
                logger.exception("the update could not be interrupted")
            await self._close()
