"""The connections of the processes of an engine: which groups there are, and how they are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm.config import ParallelConfig
from vllm.distributed.communicators import (
    DirectCommunicator,
    SharedMemory,
    SharedMemoryCommunicator,
)
from vllm.distributed.engine_group import EngineGroup, use_engine_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.pipeline_links import Link, PipelineLinks


class Place(NamedTuple):
    """A connection of some ranks."""

    kind: str
    """"stage": all ranks of a stage; "stream": from a rank to the same one of the next stage;
    "tokens": from a rank of the last stage to the same one of another."""
    ranks: tuple[int, ...]


def places_of(parallel: ParallelConfig) -> Iterator[Place]:
    """Yield all connections of an engine, in an order that all processes have."""
    size, last = parallel.ranks_per_stage, parallel.driver_rank
    for first in range(0, last + 1, size) if size > 1 else ():
        yield Place("stage", tuple(range(first, first + size)))
    for rank in range(last):
        yield Place("stream", (rank, rank + size))
    for rank in range(last):
        yield Place("tokens", (last + rank % size, rank))


def connect(
    parallel: ParallelConfig, make: Callable[[Place], DirectCommunicator]
) -> tuple[GroupCoordinator, PipelineLinks]:
    """Return the group of the stage's ranks and the links to other stages, both new."""
    rank, size = parallel.rank, parallel.ranks_per_stage
    made = {place: make(place) for place in places_of(parallel) if rank in place.ranks}
    links = {place: Link(one) for place, one in made.items() if place.kind != "stage"}
    tokens = [(place.ranks, link) for place, link in links.items() if place.kind == "tokens"]
    group = next((one for place, one in made.items() if place.kind == "stage"), None)
    context = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    return GroupCoordinator(rank % size, size, group, *context), PipelineLinks(
        parallel.stage,
        parallel.pipeline_parallel_size,
        links.get(Place("stream", (rank - size, rank))),
        links.get(Place("stream", (rank, rank + size))),
        next((link for (_, to), link in tokens if to == rank), None),
        tuple(link for (sender, _), link in tokens if sender == rank),
    )


class Wiring(NamedTuple):
    """Files of shared memory, by descriptors that all processes have."""

    of_places: dict[Place, int]

    @classmethod
    def make(cls, parallel: ParallelConfig) -> Wiring:
        return cls(
            {place: SharedMemory.make_file(len(place.ranks)) for place in places_of(parallel)}
        )

    @property
    def files(self) -> list[int]:
        return list(self.of_places.values())

    def open(self, parallel: ParallelConfig) -> Connections:
        """Take this process's share. ValueError: there is not enough memory."""
        return Connections(parallel, self)

    def close(self) -> None:
        """Close this process's descriptors; memory that is in use stays."""
        for file in self.files:
            os.close(file)


class Connections:
    """One process's share of that memory, from which it makes a new group after each failure."""

    def __init__(self, parallel: ParallelConfig, wiring: Wiring) -> None:
        """ValueError: there is not enough memory."""
        self._parallel = parallel
        self._memories = {
            place: SharedMemory(file, len(place.ranks))
            for place, file in wiring.of_places.items()
            if parallel.rank in place.ranks
        }

    def join(
        self, generation: int, are_others_alive: Callable[[], bool] = lambda: True
    ) -> tuple[GroupCoordinator, PipelineLinks]:
        """Return the group of the stage's ranks and the links to other stages, both new."""
        rank, seconds = self._parallel.rank, self._parallel.distributed_timeout_seconds

        def make(place: Place) -> DirectCommunicator:
            end = place.ranks.index(rank)
            memory = self._memories[place]
            return SharedMemoryCommunicator(memory, end, generation, seconds, are_others_alive)

        return connect(self._parallel, make)


def join_engines(parallel: ParallelConfig) -> None:
    """Make this process a rank of the engines that share experts, if they do. ValueError: there is
    not enough memory."""
    group: EngineGroup | None = None
    if parallel.engine_files:
        group = EngineGroup(
            parallel.engine_files,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            parallel.rank,
            parallel.world_size,
            parallel.distributed_timeout_seconds,
        )
    use_engine_group(group)
