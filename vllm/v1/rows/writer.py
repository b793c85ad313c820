"""Writes rows on threads: rows in, complete files out.

Jobs of one request run in order on any thread that is free; two threads never work on one
request. A job never waits for the engine, so an engine that waits for jobs always goes on. An
error ends the file of its request and is reported; other requests go on.
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

import torch

from vllm.exceptions import Failure, FailureKind, kind_of
from vllm.logger import init_logger
from vllm.utils.interrupts import check_interrupts
from vllm.utils.whole_files import temporary_path
from vllm.v1.outputs import ExtractedRows, SaveStats
from vllm.v1.rows.destinations import RowDestination, append_rows
from vllm.v1.rows.fields.layout import ALL_FIELDS, RowLayout
from vllm.v1.rows.file import check_row_count
from vllm.v1.rows.leaving import BadRowsError
from vllm.v1.rows.lock import remove_lock

logger = init_logger(__name__)

_LOOK_FOR_INTERRUPTS_S = 0.1


class HostEvent:
    """A ``torch.cuda.Event`` of rows that are on the host: it has always happened."""

    def record(self) -> None:
        """Do nothing: there is nothing to mark."""

    def query(self) -> bool:
        """Return whether the rows are there: they are."""
        return True

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


WriteTensors = Callable[[dict[str, torch.Tensor], HostEvent, str, int | None], None]
"""Type of ``ExampleHiddenStatesConnector._write_tensors``: tensors, event, file name, lock."""


class CollectedRows:
    """Keeps the rows on the host and hands them to a connector's own ``_write_tensors``.

    They are copied into separate memory, for ``num_rows_known`` rows at first, because the memory
    in which they come is used again for the next ones. lock: a descriptor, see ``take_lock``.
    """

    keeps = ALL_FIELDS

    def __init__(
        self, path: str, write_tensors: WriteTensors, lock: int | None, num_rows_known: int
    ) -> None:
        self._path = path
        self._temporary_path = temporary_path(path)
        self._write_tensors = write_tensors
        self._lock = lock
        self._num_rows_known = num_rows_known
        self._tensors: dict[str, torch.Tensor] = {}  # the first _num_rows of each are filled
        self._num_rows = 0

    def append(self, rows: ExtractedRows) -> None:
        end = self._num_rows + len(rows)
        for name, tensor in rows.tensors.items():
            stored = self._tensors.get(name)
            if stored is None:
                stored = tensor.new_empty((max(end, self._num_rows_known), *tensor.shape[1:]))
            elif end > len(stored):  # rows of output tokens
                grown = tensor.new_empty((max(end, 2 * len(stored)), *tensor.shape[1:]))
                grown[: self._num_rows] = stored[: self._num_rows]
                stored = grown
            stored[self._num_rows : end] = tensor
            self._tensors[name] = stored
        self._num_rows = end

    def finish(self, token_ids: list[int]) -> None:
        check_row_count(self._num_rows, len(token_ids))
        tensors = {name: tensor[: self._num_rows] for name, tensor in self._tensors.items()}
        self._tensors = {}
        tensors["token_ids"] = torch.tensor(token_ids, dtype=torch.int64)
        lock = None if self._lock is None else os.dup(self._lock)
        self._write_tensors(tensors, HostEvent(), self._temporary_path, lock)
        os.replace(self._temporary_path, self._path)

    def discard(self) -> None:
        self._tensors = {}
        with contextlib.suppress(OSError):
            os.unlink(self._temporary_path)


class RowBudget:
    """Bounds the bytes between the pool and the disk and the files being completed, and counts
    what was written. Any thread may call it."""

    def __init__(self, limit_bytes: int, max_files_finishing: int) -> None:
        self._limit_bytes = limit_bytes
        self._max_files_finishing = max_files_finishing
        self._written = SaveStats()
        self._used_bytes = 0
        self._num_files_finishing = 0
        self._changed = threading.Condition()

    def take_bytes(self, num_bytes: int) -> None:
        """Wait until there is room. Bytes that exceed the limit by themselves may pass alone."""
        with self._changed:
            self._wait_until(
                lambda: not self._used_bytes or self._used_bytes + num_bytes <= self._limit_bytes
            )
            self._used_bytes += num_bytes

    def return_bytes(self, num_bytes: int) -> None:
        """Give back room: the bytes were written, or dropped."""
        with self._changed:
            self._used_bytes -= num_bytes
            self._changed.notify_all()

    def wait_for_files(self) -> None:
        """Wait until few enough files are being completed: each holds descriptors."""
        with self._changed:
            self._wait_until(lambda: self._num_files_finishing <= self._max_files_finishing)

    def add_file(self, count: int) -> None:
        """Count one file more (1) or less (-1) that is being completed."""
        with self._changed:
            self._num_files_finishing += count
            self._changed.notify_all()

    def count(self, written: SaveStats) -> None:
        """Add what one job wrote."""
        with self._changed:
            self._written += written

    def stats(self) -> SaveStats:
        """Return what was written so far, and the bytes that wait to be written."""
        return replace(self._written, bytes_in_flight=self._used_bytes)

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait, with the condition held; a disk that hangs does not delay an interrupt."""
        while not self._changed.wait_for(is_true, _LOOK_FOR_INTERRUPTS_S):
            check_interrupts()


class RequestWriter:
    """Makes the file of one request. Methods return at once; the threads do the work."""

    def __init__(
        self,
        request_id: str,
        path: str,
        open_destination: Callable[[], RowDestination],
        lock: int | None,
        layout: RowLayout,
        executor: Executor,
        budget: RowBudget,
        changed: queue.SimpleQueue[RequestWriter],
    ) -> None:
        """lock: a descriptor that covers the file (``take_lock``); changed: gets this writer when
        :attr:`failure` or :attr:`is_over` changes."""
        self.request_id = request_id
        self.failure: Failure | None = None
        """The reason why there will be no file; further rows need not be brought."""
        self.is_over = False
        """True once nothing more will be written."""
        self._path = path
        self._open_destination = open_destination
        self._destination: RowDestination | None = None
        self._lock, self._has_lock = lock, lock is not None
        self._layout = layout
        self._is_complete = False
        self._is_removed = False
        self._executor = executor
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_thread = False
        self._changing = threading.Lock()
        self._budget = budget
        self._changed = changed

    def append(self, arrive: Callable[[], ExtractedRows], drop: Callable[[], None]) -> None:
        """Write the rows that ``arrive`` waits for after earlier ones, then call ``drop``."""
        self._submit(lambda: self._append(arrive, drop))

    def finish(self, token_ids: list[int]) -> None:
        """Complete the file."""
        self._budget.add_file(1)
        self._submit(lambda: self._finish(token_ids))

    def discard(self) -> None:
        """Remove what there is, even a complete file: its path was not handed out."""
        self._submit(self._remove)

    def _submit(self, job: Callable[[], None]) -> None:
        """Run a job after the others, on any free thread. A job handles its own errors."""
        with self._changing:
            self._jobs.append(job)
            if self._has_thread:
                return
            self._has_thread = True
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the interpreter is exiting, and has ended the threads
            self._run()

    def _run(self) -> None:
        while True:
            with self._changing:
                if not self._jobs:
                    self._has_thread = False
                    return
                job = self._jobs.popleft()
            job()

    def _append(self, arrive: Callable[[], ExtractedRows], drop: Callable[[], None]) -> None:
        try:
            with self._failures_reported():
                if self.failure is None:
                    rows = arrive()
                    start = time.perf_counter()
                    append_rows(self._open(), rows, self._layout)
                    seconds = time.perf_counter() - start
                    num_bytes = rows.hidden_states.nbytes
                    self._budget.count(SaveStats(len(rows), num_bytes, write_seconds=seconds))
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
                self._release_lock()
        self._budget.add_file(-1)
        self.is_over = True
        self._changed.put(self)

    def _open(self) -> RowDestination:
        if self._destination is None:
            self._destination = self._open_destination()
        return self._destination

    def _release_lock(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)

    def _remove(self) -> None:
        if self._is_removed:  # by now the path may be another request's
            return
        self._is_removed = True
        if self._destination is not None:
            self._destination.discard()
        if self._is_complete:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if self._has_lock:
            remove_lock(self._path)
        self._release_lock()

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
        """Give up the file for this reason. Called by jobs, and before there are any."""
        if self.failure is None:
            self.failure = failure
            self._changed.put(self)
        self._remove()


_ADVICE = {
    errno.ENOSPC: "free some space, or choose another shared_storage_path",
    errno.EDQUOT: "free some space, or choose another shared_storage_path",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EWOULDBLOCK: "another request or a client holds its lock; wait for it, or choose "
    "another path",
    errno.ENAMETOOLONG: "names of files and folders, and of the lock, have at most 255 bytes",
    errno.ENOENT: "somebody removed the folder, or the file while it was made",
}


def disk_failure(path: str, error: OSError) -> Failure:
    """Make the failure of a request whose file cannot be written."""
    advice = _ADVICE.get(error.errno or 0, "check the folder's permissions and free space")
    message = f"hidden states cannot be written to {path}: {error.strerror or error} ({advice})"
    return Failure(kind_of(error, FailureKind.WRITE_FAILED), message)


def write_failure(path: str, error: Exception) -> Failure:
    """Do the same for any exception. Some libraries that write files do not report a full disk."""
    kind = kind_of(error, FailureKind.WRITE_FAILED)
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(os.path.dirname(path) or ".").free:
            kind = FailureKind.DISK_FULL
    return Failure(kind, f"hidden states cannot be written: {error}")
