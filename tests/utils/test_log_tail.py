"""The log of a child process is passed on, and its last lines are kept."""

from __future__ import annotations

import pytest

from vllm.utils.child_process import ChildProcess, ending_of, private_folder, with_last_lines
from vllm.utils.log_tail import KEPT_LINES


def test_the_end_of_a_childs_log(capfd: pytest.CaptureFixture[str]) -> None:
    child = ChildProcess("tests.utils.noisy_child", private_folder("vllm-test-"))
    assert child.wait() == 3
    reasons = "\n".join(f"reason {number}" for number in range(20 - KEPT_LINES, 20))
    assert child.last_lines == reasons
    assert with_last_lines(ending_of("rank", 1, 3), child.last_lines) == (
        f"the process of rank 1 ended with status 3; the end of its log:\n{reasons}"
    )
    child.end()
    log = capfd.readouterr().err
    assert log.count("INFO vllm.child: step") == 3000
    assert log.endswith('"done"}\n')


def test_an_end_without_a_word() -> None:
    assert with_last_lines(ending_of("engine", 0, -9), "") == (
        "the process of engine 0 ended with status -9"
    )
