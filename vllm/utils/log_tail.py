"""The last lines that a child process has written to standard error, for the reason of its end."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from contextlib import suppress
from typing import IO

KEPT_LINES = 12
MOST_LETTERS = 2000
_STANDARD_ERROR = 2
_DRAIN_SECONDS = 1.0
"""Time to wait for what an ended process has written; its own children may keep the pipe open."""
_SAYS_NOTHING = re.compile(rb'^\S+ \S+ (INFO|DEBUG) |"level": "(INFO|DEBUG)"|^\s*$')


class LogTail:
    """Passes a child's standard error on to that of this process, and keeps its last lines."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._pass_on, name="log-of-child", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        with self._stream as stream:
            for line in stream:
                with suppress(OSError):
                    os.write(_STANDARD_ERROR, line)
                if not _SAYS_NOTHING.search(line):
                    self._lines.append(line)

    @property
    def text(self) -> str:
        """The last lines, once the process has ended, without mere information."""
        self._thread.join(_DRAIN_SECONDS)
        text = b"".join(list(self._lines)).decode(errors="replace")
        return text.strip()[-MOST_LETTERS:]
