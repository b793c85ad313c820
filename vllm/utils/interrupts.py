"""Holding Ctrl-C back until it does no harm.

An interrupt that lands between two lines of bookkeeping would leave a table half written
or bytes counted that are never given back. So the engine holds interrupts while it works and
lets them in where a step may end: inside the forward pass, and while it waits.

This is state of the process, as signal handlers are. Only the main thread gets interrupts; in
other threads, and if SIGINT is not handled by Python code, nothing is held.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Gate:
    """Stands in for the SIGINT handler of the program while interrupts are held."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.open = False
        self.held = False

    def on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        # A user who presses Ctrl-C twice does not want to wait.
        if self.open or self.held:
            self.held = False
            self.handler(signal_number, frame)
        else:
            self.held = True

    def deliver(self) -> None:
        if self.held:
            self.held = False
            self.handler(signal.SIGINT, None)


_gate: _Gate | None = None


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Make interrupts wait for :func:`allow_interrupts` or for the end of the block.

    A second interrupt does not wait.
    """
    global _gate
    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if _gate is not None or not is_main_thread or not callable(handler):
        yield
        return
    gate = _Gate(handler)
    signal.signal(signal.SIGINT, gate.on_signal)  # from here on nothing is interrupted
    _gate = gate
    try:
        yield
    finally:
        _gate = None
        signal.signal(signal.SIGINT, handler)
        gate.deliver()


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Let interrupts in, inside :func:`hold_interrupts`; a waiting one comes first."""
    gate = _gate
    if gate is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        gate.open = True
        gate.deliver()
        yield
    finally:
        gate.open = False


@contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM interrupts as Ctrl-C does; yields a function that tells whether one came.

    Only for the main thread.
    """
    came = False

    def on_signal(signal_number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # held where an interrupt is
        else:  # ignored, as in the background of a shell script
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)


def check_interrupts() -> None:
    """Let in the waiting interrupt, if there is one."""
    with allow_interrupts():
        pass
