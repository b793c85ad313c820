"""The queue of units: it hands them out, and takes back those of workers that died."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from multiprocessing.connection import Connection
from operator import add
from typing import Any, NamedTuple

from vllm.exceptions import Failure, FailureError, FailureKind

MAX_ATTEMPTS = 3
"""Most workers that may die over one unit, or in a row without finishing any unit."""


class Progress(NamedTuple):
    """The samples and tokens written so far, and the seconds that workers spent on writing."""

    samples: int = 0
    tokens: int = 0
    writing_seconds: float = 0.0

    def plus(self, other: Progress) -> Progress:
        return Progress(*map(add, self, other))


class UnitQueue:
    """Hands out the units; any thread may call it.

    It is in the process that starts the workers, which call it through a proxy; each is known by
    its number.
    """

    def __init__(
        self, units: Iterable[int], on_report: Callable[[Progress], None] | None = None
    ) -> None:
        self._on_report = on_report
        self._lock = threading.Lock()
        self._free = list(units)[::-1]
        self._owner: dict[int, int] = {}
        self._deaths: Counter[int] = Counter()
        self._deaths_in_a_row = 0
        self._done = Progress()
        self._running: dict[int, Progress] = {}
        self._failure: Failure | None = None

    def claim(self, worker: int) -> int | None:
        """Return a unit to do; None if there is none now, but one may come back."""
        with self._lock:
            if not self._free:
                return None
            unit = self._free.pop()
            self._owner[unit] = worker
            return unit

    def is_finished(self) -> bool:
        """Return whether no unit is left to do or in progress."""
        with self._lock:
            return not (self._free or self._owner)

    def report(self, worker: int, progress: Progress) -> None:
        """Add the progress since the worker's last report."""
        with self._lock:
            self._running[worker] = self._running.get(worker, Progress()).plus(progress)
        if self._on_report is not None:
            self._on_report(self.progress())

    def commit(self, worker: int, unit: int) -> None:
        """Mark a unit as done; it is on the disk."""
        with self._lock:
            if self._owner.get(unit) != worker:
                return  # the worker was given up; the unit's new owner writes the same bytes
            del self._owner[unit]
            self._done = self._done.plus(self._running.pop(worker, Progress()))
            self._deaths_in_a_row = 0

    def fail(self, failure: Failure) -> None:
        """Record the reason why a worker is about to end."""
        self._failure = failure

    def release(self, worker: int) -> None:
        """Free the units of a worker that ended; raises FailureError if a worker reported a
        failure, or too many have died."""
        with self._lock:
            if self._failure is not None:
                raise FailureError(self._failure)
            units = sorted(unit for unit, owner in self._owner.items() if owner == worker)
            for unit in units:
                del self._owner[unit]
            self._free += units[::-1]
            self._running.pop(worker, None)
            self._deaths.update(units[:1])  # the worker had not reached its other units
            self._deaths_in_a_row += 1
            if units and self._deaths[units[0]] >= MAX_ATTEMPTS:
                raise _died(f"{MAX_ATTEMPTS} workers died over unit {units[0]}")
            if self._deaths_in_a_row > MAX_ATTEMPTS:
                raise _died(
                    f"{self._deaths_in_a_row} workers in a row died before they finished a unit"
                )

    def progress(self) -> Progress:
        with self._lock:
            return reduce(Progress.plus, self._running.values(), self._done)


def _died(message: str) -> FailureError:
    return FailureError(Failure(FailureKind.JOB_FAILED, message))


class RemoteQueue:
    """Forwards every method of a worker's process to the queue, which its parent serves."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            try:
                with self._lock:
                    self._connection.send((name, arguments))
                    return self._connection.recv()
            except (EOFError, OSError):  # the parent has ended
                os._exit(1)

        return call


def serve_queue(queue: UnitQueue, connection: Connection) -> None:
    """Answer the calls of a worker's :class:`RemoteQueue` in a thread, until the worker ends."""

    def serve() -> None:
        with suppress(EOFError, OSError):
            while True:
                name, arguments = connection.recv()
                connection.send(getattr(queue, name)(*arguments))

    threading.Thread(target=serve, daemon=True).start()


def end_with_parent() -> None:
    """Make this process end when its parent does, even by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child has a parent"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
