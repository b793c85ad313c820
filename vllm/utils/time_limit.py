"""A limit for calls into code of others that may never return.

An alarm ends the call where it stands: Python code, sleeps, locks and sockets end with a
TimeoutError; a call into a library ends when it comes back to Python. Signals reach the main
thread only, so in other threads nothing is limited.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """TimeoutError that says ``what`` took longer than ``seconds``; None: no limit."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main_thread:
        yield
        return

    def on_alarm(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} did not return within {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, on_alarm)
    began = time.monotonic()
    rest, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if rest:  # somebody else's alarm, which was not due before
            left = rest - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)
