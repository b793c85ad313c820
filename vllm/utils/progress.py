"""Progress bars, which become a line every 30 seconds if nobody watches them on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 30.0


class _Lines:
    """Stands in for a stderr that is not a terminal: each state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class Bar(tqdm):  # type: ignore[type-arg] # its class takes no argument at run time
    """A bar of tqdm with a lock of this process alone. tqdm's own is also that of forked processes,
    and stays locked for ever if one of them is killed with it."""


Bar.set_lock(threading.RLock())


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """Make a bar of tqdm with these arguments."""
    form: dict[str, Any] = {"dynamic_ncols": True}
    if not sys.stderr.isatty():
        seconds = {"mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS}
        form = {"file": _Lines(), "ncols": 0, **seconds}
    make: Any = Bar
    bar: tqdm[Any] = make(iterable, **form, **options)
    return bar
