"""Means by which the ranks of a group exchange tensors.

A communicator copies and nothing else, so sums are formed in one place and one order
(:class:`vllm.distributed.parallel_state.GroupCoordinator`). A rank that fails closes its
communicator, which ends the calls of the others with an error.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from vllm.ops.ranks import ALL_THERE, LEFT, meet_ranks
from vllm.utils.math_utils import cdiv

PIECE_BYTES = 2**19
"""Bytes of a rank that are in shared memory at once, and so in the processors' caches."""
_CELLS = 8  # of int64 in a cache line
_BITS_OF_TURNS = 40
"""A group has as many turns before the numbers of the next one begin."""
_LOOK_MICROSECONDS = 200_000
"""Time between two looks whether the other processes still run."""


class GroupClosedError(RuntimeError):
    """Another rank has closed its end, has ended, or did not call in time."""


class Parts(NamedTuple):
    """Elements of a dense tensor, flattened, of every rank."""

    place: slice
    """The elements."""
    of_ranks: list[torch.Tensor]
    """[elements] each, in the order of the ranks; not to be changed."""


class Communicator(Protocol):
    """Connects the ranks of one group; all of them make the same calls in the same order."""

    def exchange(self, tensor: torch.Tensor) -> Iterator[Parts]:
        """Yield the elements of all ranks' tensors, part after part, each valid until the next.

        tensor: dense, of the same size and dtype on all ranks. GroupClosedError: some rank does
        not take part.
        """
        ...

    def close(self) -> None:
        """End the calls of all ranks that are under way, and all that come."""
        ...


class DirectCommunicator(Communicator, Protocol):
    """One whose ranks also send to each other, if there are two."""

    def send(self, tensor: torch.Tensor) -> None:
        """Hand a dense tensor to the other rank, which calls :meth:`receive_into`."""
        ...

    def receive_into(self, tensor: torch.Tensor) -> None:
        """Fill a dense tensor with what the other rank sends."""
        ...


class SharedMemoryCommunicator:
    """The processes of one machine, in memory that they share (:class:`SharedMemory`).

    A part is copied into the own slot; when all ranks have announced theirs, each reads all slots.
    There are two slots a rank, in turn: whoever begins the part after the next has read this one.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        generation: int,
        timeout_seconds: float,
        are_others_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """generation: number of this group among those that used the memory, from 1 on."""
        self._memory = memory
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._are_others_alive = are_others_alive
        self._turn = generation << _BITS_OF_TURNS
        self._last_turn = (generation + 1 << _BITS_OF_TURNS) - 1
        self._state = torch.zeros(1, dtype=torch.int64)
        self._has_left = False

    def exchange(self, tensor: torch.Tensor) -> Iterator[Parts]:
        start = 0
        for mine, slots in self._pieces(tensor):
            slots[self._rank].view(tensor.dtype).copy_(mine)
            self._meet()
            place = slice(start, start := start + len(mine))
            yield Parts(place, [slot.view(tensor.dtype) for slot in slots])

    def _meet(self) -> None:
        if self._has_left:
            raise GroupClosedError("this rank has left the group")
        self._turn += 1
        waited = 0
        while True:
            meet_ranks(self._memory.flags, self._rank, self._turn, _LOOK_MICROSECONDS, self._state)
            state = int(self._state)
            if state == ALL_THERE:
                return
            if state == LEFT:
                raise GroupClosedError("another rank has left the group")
            if not self._are_others_alive():
                self.close()
                raise GroupClosedError("the process of another rank has ended")
            waited += _LOOK_MICROSECONDS
            if waited >= self._timeout_seconds * 1e6:
                self.close()
                raise GroupClosedError(
                    f"another rank has not come for {self._timeout_seconds:g} s "
                    "(distributed_timeout_seconds)"
                )

    def send(self, tensor: torch.Tensor) -> None:
        for mine, slots in self._pieces(tensor):
            slots[self._rank].view(tensor.dtype).copy_(mine)
            self._meet()

    def receive_into(self, tensor: torch.Tensor) -> None:
        for mine, slots in self._pieces(tensor):
            self._meet()
            mine.copy_(slots[1 - self._rank].view(tensor.dtype))

    def _pieces(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of a tensor, flattened, with its slots [ranks, bytes]."""
        flat, size = tensor.view(-1), tensor.element_size()
        step = PIECE_BYTES // size
        for start in range(0, len(flat), step):
            mine = flat[start : start + step]
            yield mine, self._memory.slots[(self._turn + 1) % 2, :, : len(mine) * size]

    def close(self) -> None:
        self._has_left = True
        self._memory.flags[-1, 0] = self._last_turn


class PartOfGroup:
    """Some ranks of a group, while its other ranks make the same calls."""

    def __init__(self, whole: Communicator, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks

    def exchange(self, tensor: torch.Tensor) -> Iterator[Parts]:
        for place, parts in self._whole.exchange(tensor):
            yield Parts(place, [parts[rank] for rank in self._ranks])

    def close(self) -> None:
        self._whole.close()


class SharedMemory:
    """Memory for the ranks of one machine: a file without a name, which ends with the last of
    them."""

    def __init__(self, file_descriptor: int, world_size: int) -> None:
        """file_descriptor: from :meth:`make_file`, here or in the process that started this one.

        ValueError: there is not enough memory.
        """
        num_bytes = self.num_bytes(world_size)
        try:
            self._map = mmap.mmap(file_descriptor, num_bytes)
        except OSError as error:
            raise ValueError(
                f"{num_bytes} bytes of memory for {world_size} ranks cannot be had "
                f"({error.strerror}); lower tensor_parallel_size, or data_parallel_size"
            ) from error
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        cells = (world_size + 1) * _CELLS
        self.flags = memory[: cells * 8].view(torch.int64).view(world_size + 1, _CELLS)
        self.slots = memory[_flags_bytes(world_size) :].view(2, world_size, PIECE_BYTES)
        """uint8 [2, ranks, bytes]"""

    @staticmethod
    def num_bytes(world_size: int) -> int:
        return _flags_bytes(world_size) + 2 * world_size * PIECE_BYTES

    @classmethod
    def make_file(cls, world_size: int) -> int:
        """Make the file, full of zeros; returns its descriptor, which other processes inherit."""
        file_descriptor = os.memfd_create("vllm-ranks", 0)
        os.truncate(file_descriptor, cls.num_bytes(world_size))
        return file_descriptor


def _flags_bytes(world_size: int) -> int:
    """Whole pages for the flags of all ranks, before the slots."""
    return cdiv((world_size + 1) * _CELLS * 8, mmap.PAGESIZE) * mmap.PAGESIZE
