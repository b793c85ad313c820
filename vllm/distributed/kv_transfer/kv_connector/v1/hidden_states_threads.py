"""Writer threads of the hidden-states connector, and the bounds on what waits for them.

Jobs of one request run in order on whichever thread is free; no two threads work on one
request. A job never waits for the engine, so an engine that waits here always goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from vllm.utils.interrupts import check_interrupts
from vllm.v1.outputs import SaveStats

_LOOK_FOR_INTERRUPTS_S = 0.1


class RowBudget:
    """Bounds the bytes between the pool and the disk, and the files being completed; counts what
    was written. Any thread may call it."""

    def __init__(self, limit_bytes: int, max_files_finishing: int) -> None:
        self._limit_bytes = limit_bytes
        self._max_files_finishing = max_files_finishing
        self._written = SaveStats()
        self._used_bytes = 0
        self._num_files_finishing = 0
        self._changed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """Bytes between the pool and the disk now."""
        return self._used_bytes

    def take_bytes(self, num_bytes: int) -> None:
        """Wait until there is room. What exceeds the limit by itself may pass alone."""
        with self._changed:
            self._wait_until(
                lambda: not self._used_bytes or self._used_bytes + num_bytes <= self._limit_bytes
            )
            self._used_bytes += num_bytes

    def return_bytes(self, num_bytes: int) -> None:
        """The bytes are written, or dropped."""
        with self._changed:
            self._used_bytes -= num_bytes
            self._changed.notify_all()

    def wait_for_files(self) -> None:
        """Wait until few enough files are being completed: each holds descriptors."""
        with self._changed:
            self._wait_until(lambda: self._num_files_finishing <= self._max_files_finishing)

    def add_file(self, count: int) -> None:
        """One file more (1) or less (-1) is being completed."""
        with self._changed:
            self._num_files_finishing += count
            self._changed.notify_all()

    def count(self, written: SaveStats) -> None:
        """What one job wrote."""
        with self._changed:
            self._written += written

    def stats(self) -> SaveStats:
        """What was written so far, and what waits to be."""
        return replace(self._written, bytes_in_flight=self._used_bytes)

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait, with the condition held; a disk that hangs does not hold up an interrupt."""
        while not self._changed.wait_for(is_true, _LOOK_FOR_INTERRUPTS_S):
            check_interrupts()


class WriterThreads:
    """Threads that run jobs; those of one queue in order and one at a time."""

    class Queue:
        """The jobs of one request."""

        def __init__(self) -> None:
            self.jobs: deque[Callable[[], None]] = deque()
            self.running = False

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="hidden-states-writer")
        self._changing = threading.Lock()

    def submit(self, jobs: Queue, job: Callable[[], None]) -> None:
        """Run ``job`` after those that are in the queue. A job handles its own errors."""
        with self._changing:
            jobs.jobs.append(job)
            if jobs.running:
                return
            jobs.running = True
        try:
            self._executor.submit(self._run, jobs)
        except RuntimeError:  # the interpreter ends, and has ended the threads
            self._run(jobs)

    def _run(self, jobs: Queue) -> None:
        while True:
            with self._changing:
                if not jobs.jobs:
                    jobs.running = False
                    return
                job = jobs.jobs.popleft()
            job()

    def shutdown(self) -> None:
        """Run what is queued, then end."""
        self._executor.shutdown(wait=True)
