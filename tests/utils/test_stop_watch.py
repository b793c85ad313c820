"""A process that a signal has stopped is named once, and again after it went on."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from vllm.utils import stop_watch
from vllm.utils.stop_watch import StopWatch


def check_until(watch: StopWatch, expected: bool) -> None:
    end = time.monotonic() + 20
    while watch.check() is not expected:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_names_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop_watch, "STOPPED_SECONDS", 0.05)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            watch = StopWatch("worker 3", process.pid)
            assert not watch.check()
            for count in (1, 2):
                os.kill(process.pid, signal.SIGSTOP)
                check_until(watch, True)
                assert watch.check()
                named = f"worker 3 (process {process.pid}) has been stopped"
                assert caplog.text.count(named) == count
                os.kill(process.pid, signal.SIGCONT)
                check_until(watch, False)
        finally:
            process.kill()
    assert not watch.check()
