"""Worker half of the hidden-states connector, below the pool: rows in, whole files out.

Jobs of one request run in order on whichever thread is free; no two threads work on one request. A
job never waits for the engine, so an engine that waits here always goes on. What goes wrong with a
request ends that request's file and is reported; it stops nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from typing import NamedTuple

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    CollectedExperts,
    check_row_count,
    temporary_path,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_lock import FileLock
from vllm.exceptions import Failure, FailureKind, kind_of
from vllm.logger import init_logger
from vllm.utils.expert_trace import ExpertChoices
from vllm.utils.interrupts import check_interrupts
from vllm.v1.outputs import SaveStats
from vllm.v1.rows.destinations import RowDestination, TakesExperts
from vllm.v1.rows.leaving import BadRowsError

logger = init_logger(__name__)

_LOOK_FOR_INTERRUPTS_S = 0.1


class HostEvent:
    """A ``torch.cuda.Event`` of rows that are on the host: always over."""

    def record(self) -> None:
        """Nothing to mark."""

    def query(self) -> bool:
        """Whether the rows are there."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


WriteTensors = Callable[[dict[str, torch.Tensor], HostEvent, str, int | None], None]
"""``ExampleHiddenStatesConnector._write_tensors``: tensors, event, file name, lock."""


class CollectedRows:
    """Keeps the rows on the host and hands them to a connector's own ``_write_tensors``.

    They are copied into memory of the request's own, for ``num_rows_known`` rows at first: what
    they come in is wanted for the next ones.
    """

    def __init__(
        self,
        path: str,
        write_tensors: WriteTensors,
        lock: FileLock | None,
        num_rows_known: int,
    ) -> None:
        self._path = path
        self._temporary_path = temporary_path(path)
        self._write_tensors = write_tensors
        self._lock = lock
        self._num_rows_known = num_rows_known
        self._experts = CollectedExperts()
        self._rows: torch.Tensor | None = None  # the first _num_rows of them hold something
        self._num_rows = 0

    def append_experts(self, choices: ExpertChoices) -> None:
        self._experts.append(choices)

    def append(self, rows: torch.Tensor) -> None:
        end = self._num_rows + len(rows)
        if self._rows is None:
            self._rows = rows.new_empty((max(end, self._num_rows_known), *rows.shape[1:]))
        elif end > len(self._rows):  # rows of output tokens
            grown = rows.new_empty((max(end, 2 * len(self._rows)), *rows.shape[1:]))
            grown[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = grown
        self._rows[self._num_rows : end] = rows
        self._num_rows = end

    def finish(self, token_ids: list[int]) -> None:
        check_row_count(self._num_rows, len(token_ids))
        assert self._rows is not None
        rows = self._rows[: self._num_rows]
        self._rows = None
        tensors = {"hidden_states": rows, "token_ids": torch.tensor(token_ids, dtype=torch.int64)}
        tensors |= self._experts.take(len(token_ids))
        lock_descriptor = self._lock.duplicate() if self._lock else None
        self._write_tensors(tensors, HostEvent(), self._temporary_path, lock_descriptor)
        os.replace(self._temporary_path, self._path)

    def discard(self) -> None:
        self._rows = None
        self._experts.discard()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary_path)


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


class Outcome(NamedTuple):
    """News of a request."""

    request_id: str
    failure: Failure | None
    finished: bool
    """Nothing more will be written for it."""


Arrive = Callable[[], ExpertChoices | None]
"""Waits for rows and looks at them; the choices of their experts, where those are traced."""


def _append_experts(destination: RowDestination, choices: ExpertChoices) -> None:
    if not isinstance(destination, TakesExperts):
        raise ValueError(
            f"expert_trace=True, but {type(destination).__name__} keeps no experts: give it "
            "append_experts, or leave expert_trace out"
        )
    destination.append_experts(choices)


class RequestWriter:
    """Makes the file of one request. Methods return at once; the threads do the work."""

    def __init__(
        self,
        request_id: str,
        path: str,
        open_destination: Callable[[], RowDestination],
        lock: FileLock | None,
        executor: Executor,
        budget: RowBudget,
        outcomes: queue.SimpleQueue[Outcome],
    ) -> None:
        self.request_id = request_id
        self.failure: Failure | None = None
        """Why there will be no file; further rows need not be brought."""
        self._path = path
        self._open_destination = open_destination
        self._destination: RowDestination | None = None
        self._lock = lock
        self._is_complete = False
        self._is_removed = False
        self._executor = executor
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_thread = False
        self._changing = threading.Lock()
        self._budget = budget
        self._outcomes = outcomes

    def append(self, rows: torch.Tensor, arrive: Arrive, drop: Callable[[], None]) -> None:
        """Write these rows next, once they are there, then drop what they are part of."""
        self._submit(lambda: self._append(rows, arrive, drop))

    def finish(self, token_ids: list[int]) -> None:
        """Complete the file; an outcome says when that is done, or why it failed."""
        self._budget.add_file(1)
        self._submit(lambda: self._finish(token_ids))

    def discard(self) -> None:
        """Remove what there is, a complete file too: nobody was told of it."""
        self._submit(self._remove)

    def _submit(self, job: Callable[[], None]) -> None:
        """Run it after the others, on whichever thread is free. A job handles its own errors."""
        with self._changing:
            self._jobs.append(job)
            if self._has_thread:
                return
            self._has_thread = True
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the interpreter ends, and has ended the threads
            self._run()

    def _run(self) -> None:
        while True:
            with self._changing:
                if not self._jobs:
                    self._has_thread = False
                    return
                job = self._jobs.popleft()
            job()

    def _append(self, rows: torch.Tensor, arrive: Arrive, drop: Callable[[], None]) -> None:
        try:
            with self._failures_reported():
                if self.failure is None:
                    choices = arrive()
                    start = time.perf_counter()
                    destination = self._open()
                    if choices is not None:
                        _append_experts(destination, choices)
                    destination.append(rows)
                    seconds = time.perf_counter() - start
                    self._budget.count(SaveStats(len(rows), rows.nbytes, write_seconds=seconds))
        finally:
            drop()

    def _finish(self, token_ids: list[int]) -> None:
        with self._failures_reported():
            if self.failure is None:
                start = time.perf_counter()
                self._open().finish(token_ids)
                self._is_complete = True
                seconds = time.perf_counter() - start
                self._budget.count(SaveStats(num_files=1, write_seconds=seconds))
                if self._lock is not None:
                    self._lock.release()
        self._budget.add_file(-1)
        self._outcomes.put(Outcome(self.request_id, self.failure, finished=True))

    def _open(self) -> RowDestination:
        if self._destination is None:
            self._destination = self._open_destination()
        return self._destination

    def _remove(self) -> None:
        if self._is_removed:  # by now the path may be another request's
            return
        self._is_removed = True
        if self._destination is not None:
            self._destination.discard()
        if self._is_complete:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if self._lock is not None:
            self._lock.remove()

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.fail(disk_failure(self._path, error))
        except BadRowsError as error:
            self.fail(error.failure)
        except Exception as error:
            logger.exception("request %s: its hidden states cannot be written", self.request_id)
            self.fail(write_failure(self._path, error))

    def fail(self, failure: Failure) -> None:
        """There will be no file: the outcome says why. Of jobs, and before there are any."""
        if self.failure is None:
            self.failure = failure
            self._outcomes.put(Outcome(self.request_id, failure, finished=False))
        self._remove()


_ADVICE = {
    errno.ENOSPC: "free some space, or choose another shared_storage_path",
    errno.EDQUOT: "free some space, or choose another shared_storage_path",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EWOULDBLOCK: "another request or a client holds its lock; wait for it, or choose "
    "another path",
    errno.ENAMETOOLONG: "a name of a file or folder, its lock's too, has at most 255 bytes",
    errno.ENOENT: "the folder is gone; make it again",
}


def disk_failure(path: str, error: OSError) -> Failure:
    """What to tell the client of a request whose file cannot be written."""
    advice = _ADVICE.get(error.errno or 0, "check the folder's permissions and free space")
    message = f"hidden states cannot be written to {path}: {error.strerror or error} ({advice})"
    return Failure(kind_of(error, FailureKind.WRITE_FAILED), message)


def write_failure(path: str, error: Exception) -> Failure:
    """The same of any exception. Some libraries that write files do not say that a disk is full."""
    kind = kind_of(error, FailureKind.WRITE_FAILED)
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(os.path.dirname(path) or ".").free:
            kind = FailureKind.DISK_FULL
    return Failure(kind, f"hidden states cannot be written: {error}")
