"""A child process that writes much to standard error, and ends."""

from __future__ import annotations

import os
import sys


def main(folder: str) -> int:
    for number in range(3000):
        sys.stderr.write(f"2026-01-01 00:00:00+0000 INFO vllm.child: step {number}\n")
    for number in range(20):
        sys.stderr.write(f"reason {number}\n")
    sys.stderr.write('{"time": "2026", "level": "INFO", "message": "done"}\n')
    sys.stderr.flush()
    os._exit(3)
