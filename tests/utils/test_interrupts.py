"""Interrupts wait while they are held, and come through where they are let in."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.utils.interrupts import (
    allow_interrupts,
    check_interrupts,
    hold_interrupts,
    terminated_as_interrupted,
)


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """Python's own handler before, and nothing else after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    seen = []

    @hold_interrupts()
    def work() -> None:
        interrupt()
        with hold_interrupts():
            seen.append("inner")
        seen.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["inner", "outer"]


def test_it_comes_through_where_it_is_let_in() -> None:
    seen = []

    @hold_interrupts()
    def before() -> None:
        interrupt()
        seen.append("held")
        with allow_interrupts():
            seen.append("never")

    @hold_interrupts()
    @allow_interrupts()
    def inside() -> None:
        interrupt()
        seen.append("never")

    @hold_interrupts()
    def asked() -> None:
        check_interrupts()
        interrupt()
        check_interrupts()
        seen.append("never")

    for work in (before, inside, asked):
        with pytest.raises(KeyboardInterrupt):
            work()
    assert seen == ["held"]


def test_after_a_passage_they_are_held_again() -> None:
    seen = []

    @hold_interrupts()
    def work() -> None:
        with allow_interrupts():
            pass
        interrupt()
        seen.append("held")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["held"]


def test_an_alarm_and_an_interrupt_are_both_delivered() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))

    @hold_interrupts()
    def work() -> None:
        interrupt()
        signal.raise_signal(signal.SIGALRM)
        assert not rung

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_second_one_does_not_wait() -> None:
    seen = []

    @hold_interrupts()
    def work() -> None:
        interrupt()
        seen.append("first")
        interrupt()
        seen.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["first"]


def test_it_comes_with_the_exception_that_ends_the_block() -> None:
    @hold_interrupts()
    def work() -> None:
        interrupt()
        raise ValueError("something else")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_program_is_called_when_the_time_has_come() -> None:
    calls: list[tuple[int, int]] = []

    def handler(number: int, _: object) -> None:
        calls.append((number, len(calls)))

    signal.signal(signal.SIGINT, handler)
    with hold_interrupts():
        interrupt()
        assert calls == []
    assert calls == [(signal.SIGINT, 0)]
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with hold_interrupts():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_tests_can_interrupt_what_they_start() -> None:
    """Also when they themselves were started by a shell that ignores Ctrl-C."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_interrupts(handler: Any) -> None:
    """Held as Ctrl-C is; also where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, handler), signal.getsignal(signal.SIGTERM)
    steps = []

    def terminate() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGTERM)
            steps.append("held")

    try:
        with terminated_as_interrupted() as came:
            assert not came()
            with pytest.raises(KeyboardInterrupt):
                terminate()
            assert came()
        assert steps == (["held"] if callable(handler) else [])
        assert signal.getsignal(signal.SIGTERM) == before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])


def test_other_threads_hold_nothing() -> None:
    seen = []

    def work() -> None:
        with hold_interrupts(), allow_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    with hold_interrupts():
        held = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [held]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [held, signal.default_int_handler]
