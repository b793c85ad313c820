"""The memory by which the processes of an engine are connected, and each one's ends of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm.config import ParallelConfig
from vllm.distributed.communicators import SharedMemory, SharedMemoryCommunicator
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.pipeline_links import Link, PipelineLinks

Pair = tuple[int, int]
"""Ranks of a sender and a receiver."""


class Wiring(NamedTuple):
    """Files of shared memory, by descriptors that all processes have."""

    stages: list[int]
    """One for the ranks of each stage."""
    streams: dict[Pair, int]
    """From a rank to the same one of the next stage."""
    tokens: dict[Pair, int]
    """From a rank of the last stage to the same one of each other."""

    @classmethod
    def make(cls, parallel: ParallelConfig) -> Wiring:
        size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        others = range((stages - 1) * size)
        last = parallel.driver_rank
        return cls(
            [SharedMemory.make_file(size) for _ in range(stages)],
            {(rank, rank + size): SharedMemory.make_file(2) for rank in others},
            {(last + rank % size, rank): SharedMemory.make_file(2) for rank in others},
        )

    @property
    def files(self) -> list[int]:
        return [*self.stages, *self.streams.values(), *self.tokens.values()]

    def close(self) -> None:
        """Close this process's descriptors; memory that is in use stays."""
        for file in self.files:
            os.close(file)


class Connections:
    """One process's share of that memory, from which it makes a new group after each failure."""

    def __init__(self, parallel: ParallelConfig, wiring: Wiring) -> None:
        """ValueError: there is not enough memory."""
        self._parallel = parallel
        size = parallel.tensor_parallel_size
        self._group = SharedMemory(wiring.stages[parallel.stage], size)
        self._streams = dict(self._own(wiring.streams))
        self._tokens = dict(self._own(wiring.tokens))

    def _own(self, files: dict[Pair, int]) -> Iterator[tuple[Pair, SharedMemory]]:
        for pair, file in files.items():
            if self._parallel.rank in pair:
                yield pair, SharedMemory(file, 2)

    def join(
        self, generation: int, are_others_alive: Callable[[], bool] = lambda: True
    ) -> tuple[GroupCoordinator, PipelineLinks]:
        """Return the group of the stage's ranks and the links to other stages, both new."""
        parallel, seconds = self._parallel, self._parallel.distributed_timeout_seconds
        rank, size = parallel.rank, parallel.tensor_parallel_size
        group = SharedMemoryCommunicator(
            self._group, rank % size, generation, seconds, are_others_alive
        )

        def link(pair: Pair, memory: SharedMemory) -> Link:
            end = pair.index(rank)
            return Link(
                SharedMemoryCommunicator(memory, end, generation, seconds, are_others_alive)
            )

        streams = {pair: link(pair, memory) for pair, memory in self._streams.items()}
        tokens = {pair: link(pair, memory) for pair, memory in self._tokens.items()}
        links = PipelineLinks(
            parallel.stage,
            parallel.pipeline_parallel_size,
            streams.get((rank - size, rank)),
            streams.get((rank, rank + size)),
            next((one for (_, to), one in tokens.items() if to == rank), None),
            tuple(one for (sender, _), one in tokens.items() if sender == rank),
        )
        context = parallel.decode_context_parallel_size
        return GroupCoordinator(rank % size, size, group, context), links
