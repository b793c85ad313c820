"""Bars on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from vllm.utils import progress
from vllm.utils.progress import progress_bar


def test_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last state within 30 seconds; one more for each interval."""
    for seconds, expected in ((30.0, 2), (0.0, 101)):
        monkeypatch.setattr(progress, "LINE_SECONDS", seconds)
        with progress_bar(total=100, desc="Extracting", unit=" tokens") as bar:
            for _ in range(100):
                bar.update()
        printed = capsys.readouterr().err
        assert "\r" not in printed
        lines = printed.splitlines()
        assert abs(len(lines) - expected) <= 1
        assert lines[0].startswith("Extracting:   0% 0/100") and "100/100" in lines[-1]
    monkeypatch.setattr(progress, "LINE_SECONDS", 30.0)
    assert list(progress_bar(iter("abc"), desc="Checking", leave=False)) == ["a", "b", "c"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Checking:")


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar(total=2, desc="Extracting") as bar:
        bar.update(2)
    assert "\r" in capsys.readouterr().err


def test_a_forked_process_that_dies_with_the_lock() -> None:
    next(iter(progress_bar(range(2), leave=False)))
    child = os.fork()
    if child == 0:
        type(progress_bar(range(2))).get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    bar = threading.Thread(target=lambda: list(progress_bar(range(2))), daemon=True)
    bar.start()
    bar.join(20)
    assert not bar.is_alive()
