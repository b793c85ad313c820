"""The Ray actor that has a rank's process.

The process is the one that other executors start. So it has no threads of Ray, its own environment,
and it ends with the actor in any way.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from vllm.utils.child_process import ChildProcess, private_folder


class RankActor:
    """Starts a rank's process on its node."""

    def __init__(self, environment: dict[str, str]) -> None:
        """environment: variables for the process besides those of the node."""
        # Ray puts folders of its own on the path of modules, and those of the program that started.
        ray = sys.modules.get("ray")
        own = os.path.dirname(str(ray.__file__)) if ray is not None else ""
        paths = [one for one in sys.path if one and not (own and one.startswith(own))]
        self._process = ChildProcess(
            "vllm.v1.executor.rank_process",
            private_folder("vllm-rank-"),
            environment={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def run(self, settings: bytes) -> tuple[int, str]:
        """Hand over the settings, and wait for the end of the process; returns its status and the
        last lines of its log."""
        with suppress(BrokenPipeError):
            self._process.send_pickled(settings)
        return self._process.wait(), self._process.last_lines

    def write_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def end(self) -> None:
        self._process.end()
