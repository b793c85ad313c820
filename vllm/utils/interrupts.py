"""Holding Ctrl-C, and the alarms by which programs limit time, back until they do no harm.

An interrupt that lands between two lines of bookkeeping would leave a table half written
or bytes counted that are never given back. So the engine holds interrupts while it works and
lets them in where a step may end: inside the forward pass, and while it waits.

This is state of the process, as signal handlers are. Only the main thread gets interrupts; in
other threads, and if a signal is not handled by Python code, nothing is held.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HELD = (signal.SIGINT, signal.SIGALRM)
Handler = Callable[[int, FrameType | None], Any]


class _Gate:
    """Stands in for the handlers of the program while interrupts are held."""

    def __init__(self, handlers: dict[int, Handler]) -> None:
        self._handlers = handlers
        self.open = False
        self._held: set[int] = set()

    def on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        # A user who presses Ctrl-C twice does not want to wait.
        if self.open or signal_number in self._held:
            self._held.discard(signal_number)
            self.call_handler(signal_number, frame)
        else:
            self._held.add(signal_number)

    def call_handler(self, signal_number: int, frame: FrameType | None) -> None:
        self._handlers[signal_number](signal_number, frame)

    def deliver(self) -> None:
        if self._held:
            try:
                self.call_handler(self._held.pop(), None)
            finally:
                self.deliver()


_gate: _Gate | None = None


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Make interrupts wait for :func:`allow_interrupts` or for the end of the block.

    A second interrupt does not wait.
    """
    global _gate
    is_main_thread = threading.current_thread() is threading.main_thread()
    if _gate is not None or not is_main_thread:
        yield
        return
    handlers: dict[int, Handler] = {
        one: handler for one in HELD if callable(handler := signal.getsignal(one))
    }
    gate = _Gate(handlers)
    for one in handlers:
        signal.signal(one, gate.on_signal)  # from here on nothing is interrupted
    _gate = gate
    try:
        yield
    finally:
        _gate = None
        for one, handler in handlers.items():
            signal.signal(one, handler)
        gate.deliver()


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is no :class:`Exception`, or came out of a handler that
    :func:`hold_interrupts` had called: nothing failed, somebody wants the work to end."""
    frames = traceback.walk_tb(error.__traceback__)
    is_from_handler = any(one.f_code is _Gate.call_handler.__code__ for one, _ in frames)
    return is_from_handler or not isinstance(error, Exception)


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
