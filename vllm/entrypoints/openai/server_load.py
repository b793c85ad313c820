"""Numbers that the HTTP processes of one server share: each writes its own and reads all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from typing import NamedTuple

_BYTES = 8


class SharedNumbers(NamedTuple):
    """One integer of each kind for each HTTP process, in memory that they share."""

    load: MutableSequence[int]
    """Generation requests in progress."""
    closed: MutableSequence[int]
    """Connections that have ended, since the start of the server."""

    @classmethod
    def create(cls, path: str, num_processes: int) -> SharedNumbers:
        """Make the file of the numbers, all 0."""
        with open(path, "xb") as file:
            file.truncate(len(cls._fields) * num_processes * _BYTES)
        return cls.open(path)

    @classmethod
    def open(cls, path: str) -> SharedNumbers:
        """Open the file of the numbers."""
        with open(path, "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size))
        size = len(memory) // len(cls._fields)
        kinds = [memory[i * size : (i + 1) * size].cast("q") for i in range(len(cls._fields))]
        return cls(*kinds)  # type: ignore[arg-type]  # a memoryview is one in all that is used


class ServerLoad:
    """The number of generation requests in progress, including streams.

    numbers: that of each HTTP process. Two processes that begin a request at the same moment may
    both see the number without the other's.
    """

    def __init__(self, numbers: MutableSequence[int] | None = None, own: int = 0) -> None:
        self._numbers = [0] if numbers is None else numbers
        self._own = own

    @property
    def total(self) -> int:
        return sum(self._numbers)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more inside the block."""
        self._numbers[self._own] += 1
        try:
            yield
        finally:
            self._numbers[self._own] -= 1
