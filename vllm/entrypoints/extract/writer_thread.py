"""Writing beside the engine: it waits only while the disk is behind by more than is allowed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

MAX_WAITING_BYTES = 256 << 20
"""Rows that may wait for the disk; one sample always may."""

Item = TypeVar("Item")


class WriterThread(Generic[Item]):
    """Calls ``write`` with each item, in order, on one thread.

    As a context manager: leaving it waits until everything is written; leaving it by an
    exception drops what waits. What ``write`` raises is raised by the next call, or on leaving.
    """

    def __init__(self, write: Callable[[Item], None]) -> None:
        self._write = write
        self._items: deque[tuple[Item, int]] = deque()
        self._waiting_bytes = 0
        self._num_unwritten = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="extract-writer", daemon=True)

    def put(self, item: Item, num_bytes: int) -> None:
        """Hand over an item that holds so much memory; waits while there is too much."""
        most = max(0, MAX_WAITING_BYTES - num_bytes)
        with self._changed:
            self._wait_for(lambda: self._waiting_bytes <= most)
            self._items.append((item, num_bytes))
            self._waiting_bytes += num_bytes
            self._num_unwritten += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Returns when everything is written."""
        with self._changed:
            self._wait_for(lambda: not self._num_unwritten)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._error is not None)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items) or self._is_closed)
                if not self._items:
                    return
                item, num_bytes = self._items.popleft()
            try:
                self._write(item)
            except BaseException as error:  # belongs to whoever puts the next item
                with self._changed:
                    self._error = error
                    self._items.clear()
                    self._changed.notify_all()
                return
            del item
            with self._changed:
                self._waiting_bytes -= num_bytes
                self._num_unwritten -= 1
                self._changed.notify_all()

    def __enter__(self) -> WriterThread[Item]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            if error is not None:
                self._items.clear()
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error


__all__ = ["MAX_WAITING_BYTES", "WriterThread"]
