"""Which unit is whose: handing out units, and taking back those of workers that died."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import reduce
from multiprocessing.managers import BaseManager
from operator import add
from typing import NamedTuple

from vllm.exceptions import Failure, FailureError, FailureKind

MAX_ATTEMPTS = 3
"""Workers that may die over one unit, and in a row without having finished any."""


class Progress(NamedTuple):
    """What was written so far; seconds are those in which a worker wrote."""

    samples: int = 0
    tokens: int = 0
    writing_seconds: float = 0.0

    def plus(self, other: Progress) -> Progress:
        return Progress(*map(add, self, other))


class UnitQueue:
    """The one who hands out the units; any thread may call it.

    Workers elsewhere call it through a proxy; each is known by its number.
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
        """A unit to do; None: there is none now, but one may come back."""
        with self._lock:
            if not self._free:
                return None
            unit = self._free.pop()
            self._owner[unit] = worker
            return unit

    def is_finished(self) -> bool:
        """Whether nothing is left to wait for."""
        with self._lock:
            return not (self._free or self._owner)

    def report(self, worker: int, progress: Progress) -> None:
        """What was written since the last report."""
        with self._lock:
            self._running[worker] = self._running.get(worker, Progress()).plus(progress)
        if self._on_report is not None:
            self._on_report(self.progress())

    def commit(self, worker: int, unit: int) -> None:
        """The unit is on the disk."""
        with self._lock:
            if self._owner.get(unit) != worker:
                return  # it died meanwhile; who has the unit now writes the same bytes
            del self._owner[unit]
            self._done = self._done.plus(self._running.pop(worker, Progress()))
            self._deaths_in_a_row = 0

    def fail(self, failure: Failure) -> None:
        """A worker is about to end, for this reason."""
        self._failure = failure

    def release(self, worker: int) -> None:
        """A worker ended: others take its units. FailureError: one has failed by itself, or too
        many have died."""
        with self._lock:
            if self._failure is not None:
                raise FailureError(self._failure)
            units = sorted(unit for unit, owner in self._owner.items() if owner == worker)
            for unit in units:
                del self._owner[unit]
            self._free += units[::-1]
            self._running.pop(worker, None)
            self._deaths.update(units[:1])  # the others were only waiting their turn
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


class QueueManager(BaseManager):
    """A process with a queue that other processes share."""


QueueManager.register("make_queue", UnitQueue)


def end_with_parent() -> None:
    """From now on this process ends when its parent does, even by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child has a parent"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
