"""In which order a fake card does what it is given.

At once (:class:`AtOnce`); at once, while clocks of streams and of the host find what nothing puts
in order (:class:`Clocks`); or as late as a real card may, in an order drawn by a seed, with
results poisoned until then (:class:`Late`). The host is one party, whichever thread acts: what
happens later on it happens after.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One operation as the card is given it; storages are named by their addresses."""

    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    run: Callable[[], object]


class AtOnce:
    """Every operation when it is given."""

    is_late = False

    def launch(self, stream: object, operation: Launch) -> None:
        operation.run()

    def record(self, stream: object) -> Any:
        """An event: what the stream was given so far."""

    def wait(self, stream: object, event: Any) -> None:
        """Everything that the stream is given from now on comes after the event."""

    def synchronize(self, event: Any) -> None:
        """The host waits for the event."""

    def synchronize_stream(self, stream: object) -> None:
        """The host waits for all that the stream was given."""
        self.synchronize(self.record(stream))

    def release(self, stream: object, storage: torch.UntypedStorage) -> None:
        """The last tensor on memory that was allocated on the stream is gone: what is allocated
        there next may get it."""

    def finish(self) -> None:
        """Do all that was given."""


Clock = Counter[object]
"""Number of operations of each stream that are known to be done."""


class _Access(NamedTuple):
    stream: object
    number: int
    name: str

    def is_known_to(self, clock: Clock) -> bool:
        return clock[self.stream] >= self.number


@dataclass
class _History:
    """The last accesses of one storage that count."""

    write: _Access | None = None
    reads: dict[object, _Access] = field(default_factory=dict)


class Clocks(AtOnce):
    """Finds accesses of one memory, one of them a write, which no wait puts in order."""

    def __init__(self) -> None:
        self.findings: set[str] = set()
        self._streams: dict[object, Clock] = {}
        self._host: Clock = Counter()
        self._histories: dict[int, _History] = {}
        self._changing = threading.RLock()

    def launch(self, stream: object, operation: Launch) -> None:
        with self._changing:
            self._note(stream, operation)
            operation.run()

    def _note(self, stream: object, operation: Launch) -> None:
        clock = self._streams.setdefault(stream, Counter())
        clock |= self._host
        clock[stream] += 1
        self._streams[stream] = clock
        access = _Access(stream, clock[stream], operation.name)
        for place in operation.reads | operation.writes:
            history = self._histories.setdefault(place, _History())
            before = [history.write]
            if place in operation.writes:
                before += history.reads.values()
            self._compare(before, clock, f"{operation.name} does not wait for")
            if place in operation.writes:
                self._histories[place] = _History(access)
            else:
                history.reads[stream] = access

    def _compare(self, accesses: Iterable[_Access | None], clock: Clock, what: str) -> None:
        for access in accesses:
            if access is not None and not access.is_known_to(clock):
                self.findings.add(f"{what} {access.name}")

    def record(self, stream: object) -> Clock:
        with self._changing:
            return Counter(self._streams.setdefault(stream, Counter()) | self._host)

    def wait(self, stream: object, event: Clock) -> None:
        with self._changing:
            self._streams[stream] = self._streams.setdefault(stream, Counter()) | event

    def synchronize(self, event: Clock) -> None:
        with self._changing:
            self._host |= event

    def release(self, stream: object, storage: torch.UntypedStorage) -> None:
        with self._changing:
            history = self._histories.pop(storage.data_ptr(), None)
            if history is not None:
                accesses = [history.write, *history.reads.values()]
                clock = self.record(stream)
                self._compare(accesses, clock, "memory is given back before the end of")


class _Mark(NamedTuple):
    """An event: so many entries of a stream."""

    stream: object
    number: int


class Late(AtOnce):
    """Every operation as late as it may be, or at some time before: the seed says.

    Memory that was released is poisoned when its stream comes to that, as its next owner would
    write it.
    """

    is_late = True

    def __init__(self, seed: int) -> None:
        self.errors: list[BaseException] = []
        self._random = random.Random(seed)
        self._eagerness = self._random.choice([0.0, 0.02, 0.5])
        self._queues: dict[object, deque[Callable[[], object] | _Mark]] = {}
        self._num_done: Counter[object] = Counter()
        self._changing = threading.RLock()

    def drawn(self, chance: float) -> bool:
        """Draw whether something that has this chance happens."""
        return self._random.random() < chance

    def _queue(self, stream: object) -> deque[Callable[[], object] | _Mark]:
        return self._queues.setdefault(stream, deque())

    def launch(self, stream: object, operation: Launch) -> None:
        with self._changing:
            self._queue(stream).append(operation.run)
            while self.drawn(self._eagerness):
                self._step(self._random.choice(list(self._queues)))

    def _step(self, stream: object) -> None:
        """The stream's next entry, and what that waits for."""
        queue = self._queue(stream)
        if not queue:
            return
        entry = queue.popleft()
        self._num_done[stream] += 1
        if isinstance(entry, _Mark):
            self._reach(entry)
            return
        try:
            with torch.inference_mode():
                entry()
        except Exception as error:  # indices that are poison
            self.errors.append(error)

    def record(self, stream: object) -> _Mark:
        with self._changing:
            return _Mark(stream, self._num_done[stream] + len(self._queue(stream)))

    def wait(self, stream: object, event: _Mark) -> None:
        with self._changing:
            self._queue(stream).append(event)

    def synchronize(self, event: _Mark) -> None:
        with self._changing:
            if self.drawn(0.5):  # the others may have been faster
                for stream in list(self._queues):
                    if stream is not event.stream:
                        self._reach(self.record(stream))
            self._reach(event)

    def _reach(self, event: _Mark) -> None:
        while self._num_done[event.stream] < event.number:
            self._step(event.stream)

    def release(self, stream: object, storage: torch.UntypedStorage) -> None:
        with self._changing:
            self._queue(stream).append(lambda: storage.fill_(POISON))

    def finish(self) -> None:
        with self._changing:
            for stream in list(self._queues):
                self.synchronize(self.record(stream))


POISON = 0xFF
"""Value of every byte: NaN in floating point, -1 as an index."""
