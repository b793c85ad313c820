"""Notices that another process has been stopped by a signal, which looks like a long wait."""

from __future__ import annotations

import time
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

STOPPED_SECONDS = 30.0
"""Time after which a process that a signal has stopped counts as not running."""


class StopWatch:
    """Names a process of this machine in the log once it has been stopped for a while."""

    def __init__(self, name: str, pid: int) -> None:
        self._name, self._pid = name, pid
        self._since: float | None = None
        self._was_told = False

    def check(self) -> bool:
        """Return whether the process has been stopped for ``STOPPED_SECONDS``; log it once."""
        if not _is_stopped(self._pid):
            self._since, self._was_told = None, False
            return False
        now = time.monotonic()
        since = self._since = self._since or now  # local: several threads may look at once
        is_long = now - since >= STOPPED_SECONDS
        if is_long and not self._was_told:
            self._was_told = True
            logger.error(
                "%s (process %d) has been stopped for %.0f s by SIGSTOP or a debugger: its work "
                "waits until it goes on (kill -CONT %d)",
                *(self._name, self._pid, now - since, self._pid),
            )
        return is_long


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
