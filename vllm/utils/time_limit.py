"""A time limit for calls into third-party code that may never return.

In the main thread an alarm ends the call at once: Python code, sleeps, locks and sockets end with a
TimeoutError; a call into a library ends when it returns to Python. Signals do not reach other
threads: there a watchdog ends the call when it next runs Python code. The log says that the call is
late, because a sleep or a lock may never end.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vllm.logger import init_logger

logger = init_logger(__name__)


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError, which names ``what``, after ``seconds``; None: no limit."""
    message = f"{what} did not return within {seconds or 0:g} seconds"
    if seconds is None:
        yield
    elif threading.current_thread() is threading.main_thread():
        with _alarm(seconds, message):
            yield
    else:
        with _watchdog.watch(seconds, message):
            yield


@contextmanager
def _alarm(seconds: float, message: str) -> Iterator[None]:
    def on_alarm(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    handler = signal.signal(signal.SIGALRM, on_alarm)
    began = time.monotonic()
    rest, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if rest:  # another alarm was set, and was not due before this one
            left = rest - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


class _LateError(TimeoutError):
    """Raised by the watchdog in the thread of a late call."""


class _Call:
    def __init__(self, deadline: float, message: str) -> None:
        self.deadline = deadline
        self.message = message
        self.thread_id = threading.get_ident()
        self.is_late = False

    def raise_in_thread(self, error: type[BaseException] | None) -> None:
        """Raise ``error`` when the thread next runs Python code; None: cancel a pending one."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.thread_id), None if error is None else ctypes.py_object(error)
        )


class _Watchdog:
    """One thread that watches the calls of all others. It starts with the first call and sleeps
    until the earliest deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[_Call] = set()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, seconds: float, message: str) -> Iterator[None]:
        call = _Call(time.monotonic() + seconds, message)
        self._add(call)
        try:
            yield
        except _LateError:
            if not call.is_late:  # a limit around this one ended it
                raise
        finally:
            with self._changed:
                self._calls.discard(call)
            if call.is_late:
                call.raise_in_thread(None)
        if call.is_late:
            raise TimeoutError(message)

    def _add(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # a fork has none
                self._wakes_at = math.inf
                self._thread = threading.Thread(target=self._run, name="time-limit", daemon=True)
                self._thread.start()
            if call.deadline < self._wakes_at:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for call in [one for one in self._calls if one.deadline <= now]:
                    self._calls.discard(call)
                    call.is_late = True
                    logger.error("%s; it ends when it next runs Python code", call.message)
                    call.raise_in_thread(_LateError)
                self._wakes_at = min((one.deadline for one in self._calls), default=math.inf)
                left = self._wakes_at - now
                self._changed.wait(None if left == math.inf else max(left, 0.0))


_watchdog = _Watchdog()
