"""Messages from one process to several others of its machine, in memory that they share.

The memory is a ring of bytes. Its cells count the bytes that were written in all, and those that
each reader has taken. A message is longer than the ring if need be: it is written while it is read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from typing import NamedTuple

from vllm.utils.math_utils import cdiv

RING_BYTES = 2**20
_CELL_BYTES = 64
"""A cell has a cache line of its own."""
_LENGTH_BYTES = 8
_LOOK_NANOSECONDS = 200_000_000
"""Time between two looks whether the readers still run."""
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_FUTEX = 202 if _IS_X86 else 98
"""The number of Linux' system call."""
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1


class BroadcastPlace(NamedTuple):
    """One reader's end."""

    file_descriptor: int
    """The memory, which the reader's process inherits."""
    num_readers: int
    reader: int


class _Ring:
    def __init__(self, file_descriptor: int, num_readers: int) -> None:
        """ValueError: there is not enough memory."""
        num_bytes = _ring_bytes(num_readers)
        try:
            memory = mmap.mmap(file_descriptor, num_bytes)
        except OSError as error:
            raise ValueError(
                f"{num_bytes} bytes of memory for {num_readers + 1} ranks cannot be had "
                f"({error.strerror}); lower tensor_parallel_size, or data_parallel_size"
            ) from error
        self.data = memoryview(memory)[num_bytes - RING_BYTES :]
        cells = [
            ctypes.c_uint64.from_buffer(memory, n * _CELL_BYTES) for n in range(1 + num_readers)
        ]
        self.cells = cells
        """The writer's number of bytes, then those of the readers."""
        self._places = [ctypes.c_void_p(ctypes.addressof(cell)) for cell in cells]
        self._time = (ctypes.c_long * 2)(0, _LOOK_NANOSECONDS)
        self._call = ctypes.CDLL(None).syscall
        self._call.argtypes = (
            *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        )

    def tell(self, row: int, num_bytes: int) -> None:
        """Set a cell, and wake whoever waits for its change."""
        self._fence(row)
        self.cells[row].value = num_bytes
        self._call(_FUTEX, self._places[row], _WAKE, _ALL, None, None, 0)

    def wait(self, row: int, seen: int) -> int:
        """Wait a moment for another number than ``seen``; returns the number."""
        if self.cells[row].value == seen:
            # The half of the cell that changes with every number.
            low = seen & 0xFFFFFFFF
            self._call(_FUTEX, self._places[row], _WAIT, low, self._time, None, 0)
        now = self.cells[row].value
        self._fence(row)
        return now

    def _fence(self, row: int) -> None:
        """Keep accesses before it before those after it. x86 does so by itself for these; elsewhere
        the system call does, because it has to look for processes that wait."""
        if not _IS_X86:
            self._call(_FUTEX, self._places[row], _WAKE, 0, None, None, 0)


class BroadcastSender:
    """The writer's end."""

    def __init__(self, num_readers: int) -> None:
        """ValueError: there is not enough memory."""
        self._file = os.memfd_create("vllm-calls", 0)
        os.truncate(self._file, _ring_bytes(num_readers))
        self._num_readers = num_readers
        self._ring = _Ring(self._file, num_readers)
        self._written = 0
        self._read = 0
        """Bytes that all readers have taken, as far as is known."""

    @property
    def places(self) -> list[BroadcastPlace]:
        """The readers' ends, until :meth:`close_file`."""
        return [BroadcastPlace(self._file, self._num_readers, n) for n in range(self._num_readers)]

    def close_file(self) -> None:
        """Close this process's descriptor; the memory stays while it is in use."""
        os.close(self._file)

    def has_room(self, message: bytes) -> bool:
        """Return whether a message can be sent without a wait for readers."""
        self._look_at_readers()
        return self._written - self._read + _LENGTH_BYTES + len(message) <= RING_BYTES

    def send(self, message: bytes, look: Callable[[int], None]) -> None:
        """Hand a message to all readers.

        look: called now and then with the number of a reader that has yet to make room. What it
        raises ends the call; nothing can be sent after that.
        """
        rest = memoryview(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        while rest:
            if self._written - self._read + len(rest) > RING_BYTES:
                self._wait_for_room(look)
            start = self._written % RING_BYTES
            room = min(RING_BYTES - (self._written - self._read), RING_BYTES - start)
            part, rest = rest[:room], rest[room:]
            self._ring.data[start : start + len(part)] = part
            self._written += len(part)
            self._ring.tell(0, self._written)

    def _wait_for_room(self, look: Callable[[int], None]) -> None:
        while True:
            slowest = self._look_at_readers()
            if self._written - self._read < RING_BYTES:
                return
            if self._ring.wait(1 + slowest, self._read) == self._read:
                look(slowest)

    def _look_at_readers(self) -> int:
        """Take in what all readers have taken; returns the one that has taken least."""
        of_readers = [cell.value for cell in self._ring.cells[1:]]
        self._read = min(of_readers)
        return of_readers.index(self._read)


class BroadcastReceiver:
    """A reader's end."""

    def __init__(self, place: BroadcastPlace) -> None:
        """ValueError: there is not enough memory."""
        self._ring = _Ring(place.file_descriptor, place.num_readers)
        self._row = 1 + place.reader
        self._written = self._read = self._told = 0

    def receive(self) -> bytes:
        """Wait for the next message."""
        message = self._take(int.from_bytes(self._take(_LENGTH_BYTES), "little"))
        self._tell()
        return message

    def _take(self, num_bytes: int) -> bytes:
        taken = bytearray()
        while len(taken) < num_bytes:
            if self._written == self._read:
                self._tell()
                while self._written == self._read:
                    self._written = self._ring.wait(0, self._read)
            start = self._read % RING_BYTES
            there = min(num_bytes - len(taken), self._written - self._read, RING_BYTES - start)
            taken += self._ring.data[start : start + there]
            self._read += there
        return bytes(taken)

    def _tell(self) -> None:
        if self._told != self._read:
            self._told = self._read
            self._ring.tell(self._row, self._read)


def _ring_bytes(num_readers: int) -> int:
    """The ring, after whole pages for the cells."""
    cells = (1 + num_readers) * _CELL_BYTES
    return cdiv(cells, mmap.PAGESIZE) * mmap.PAGESIZE + RING_BYTES
