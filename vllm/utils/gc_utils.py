"""Python's garbage collector in processes that keep many requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 20)
"""New objects, and collections of each younger generation, before a collection. A queue of
10,000 requests is half a million objects; a step makes and drops thousands, none in cycles."""


def settle_garbage_collector() -> None:
    """What exists now stays as long as the process: do not look at it again; look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports: modules stay, and looking for garbage among them takes an eighth of the time.

    Nor is all of it looked at as the youngest at the first chance behind this.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:  # else somebody's objects are kept out on purpose
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
