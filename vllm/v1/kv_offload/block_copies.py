"""Copies of whole blocks between the pool and host memory, with neighbours as one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from vllm.utils.host_memory import allocate_host_bytes, allocate_pinned_bytes


class BlockCopy(NamedTuple):
    """One block of host memory and one of the pool; the direction depends on the use."""

    stored: int
    block: int


def neighbours(copies: Iterable[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first in host memory, first in the pool, count)`` of runs on both sides."""
    first: BlockCopy | None = None
    count = 0
    for copy in sorted(copies):
        if first is not None and copy == (first.stored + count, first.block + count):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = copy, 1
    if first is not None:
        yield (*first, count)


class BlockCopies:
    """Host memory with blocks of the pool's size, and the copies between the two.

    All layers of a block lie side by side, so a block is one copy. On a card, copies go through
    pinned memory on a separate stream: work that is queued after :meth:`load` finds the blocks,
    and saves run beside later work until :meth:`end_saves`. ValueError: not enough memory.
    """

    def __init__(self, pool: torch.Tensor, num_host_blocks: int, advice: str) -> None:
        self.pool = pool  # int8 [blocks, block bytes]
        num_bytes = num_host_blocks * pool.shape[1]
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cpu":
            memory = allocate_host_bytes(num_bytes, "host memory", advice, touched=True)
        else:
            memory = allocate_pinned_bytes(num_bytes, "pinned host memory", advice)
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self.memory = memory.view(num_host_blocks, pool.shape[1])

    def load(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks from host memory to the pool."""
        with self._after_current():
            for stored, block, count in neighbours(copies):
                target = self.pool[block : block + count]
                target.copy_(self.memory[stored : stored + count], non_blocking=True)
        self.end_saves()

    def save(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks from the pool to host memory; do not write them until :meth:`end_saves`."""
        with self._after_current():
            for stored, block, count in neighbours(copies):
                target = self.memory[stored : stored + count]
                target.copy_(self.pool[block : block + count], non_blocking=True)

    def end_saves(self) -> None:
        """End the saves: work that is queued from now on may write all blocks."""
        if self._stream is not None:
            torch.cuda.current_stream(self.pool.device).wait_stream(self._stream)

    def _after_current(self) -> torch.cuda.StreamContext:
        """Use the separate stream, after the work queued on the current one."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        return torch.cuda.stream(self._stream)  # None: no change
