"""Child processes leave signals to their parent, from their first moment on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from vllm.utils.child_process import ChildProcess, private_folder


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_a_child_loads(one: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The terminal sends it to the whole group; a traceback would stand beside the last line."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = ChildProcess("tests.utils.slow_child", private_folder("vllm-test-"))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    for _ in range(12):
        os.kill(child.pid, one)
        time.sleep(0.02)
    assert child.wait() == 5
    child.end()
    assert capfd.readouterr().err == ""
