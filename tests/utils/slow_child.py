"""A child process that loads for some time, as those that load torch do."""

from __future__ import annotations

import signal
import time

time.sleep(0.3)


def main(folder: str) -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return 5 if not blocked else 6
