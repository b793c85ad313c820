"""Which unit is whose: handing out units, and taking back those of workers that died."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

MAX_ATTEMPTS = 3
"""Workers that may die over one unit, and in a row without having finished any."""


class Progress(NamedTuple):
    """What was written so far; seconds are those in which a worker wrote."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    writing_seconds: float = 0.0

    def plus(self, other: Progress) -> Progress:
        return Progress(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.writing_seconds + other.writing_seconds,
        )


class UnitSource(Protocol):
    """What a worker asks of the one who hands out the units."""

    def claim(self, worker: int) -> int | None:
        """A unit to do; None: there is none now, but one may come back."""

    def is_finished(self) -> bool:
        """Whether nothing is left to wait for."""

    def report(self, worker: int, progress: Progress) -> None:
        """What was written since the last report."""

    def commit(self, worker: int, unit: int) -> None:
        """The unit is on the disk."""


class UnitQueue:
    """The one who hands out the units; any thread may call it."""

    def __init__(self, units: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._free = list(units)[::-1]
        self._owner: dict[int, int] = {}
        self._deaths: Counter[int] = Counter()
        self._deaths_in_a_row = 0
        self._done = Progress()
        self._running: dict[int, Progress] = {}

    def claim(self, worker: int) -> int | None:
        with self._lock:
            if not self._free:
                return None
            unit = self._free.pop()
            self._owner[unit] = worker
            return unit

    def is_finished(self) -> bool:
        with self._lock:
            return not (self._free or self._owner)

    def report(self, worker: int, progress: Progress) -> None:
        with self._lock:
            self._running[worker] = self._running.get(worker, Progress()).plus(progress)

    def commit(self, worker: int, unit: int) -> None:
        with self._lock:
            if self._owner.get(unit) != worker:
                return  # it died meanwhile; who has the unit now writes the same bytes
            del self._owner[unit]
            self._done = self._done.plus(self._running.pop(worker, Progress()))
            self._deaths_in_a_row = 0

    def release(self, worker: int) -> None:
        """A worker died: others take its units. RuntimeError: too many have died."""
        with self._lock:
            units = sorted(unit for unit, owner in self._owner.items() if owner == worker)
            for unit in units:
                del self._owner[unit]
            self._free += units[::-1]
            self._running.pop(worker, None)
            self._deaths.update(units[:1])  # the others were only waiting their turn
            self._deaths_in_a_row += 1
            if units and self._deaths[units[0]] >= MAX_ATTEMPTS:
                raise RuntimeError(f"{MAX_ATTEMPTS} workers died over unit {units[0]}")
            if self._deaths_in_a_row > MAX_ATTEMPTS:
                raise RuntimeError(
                    f"{self._deaths_in_a_row} workers in a row died before they finished a unit"
                )

    def progress(self) -> Progress:
        with self._lock:
            total = self._done
            for running in self._running.values():
                total = total.plus(running)
            return total


__all__ = ["MAX_ATTEMPTS", "Progress", "UnitQueue", "UnitSource"]
