"""Python's garbage collector in processes that keep many requests."""

from __future__ import annotations

import gc

_THRESHOLDS = (50_000, 20, 20)
"""New objects, and collections of each younger generation, before a collection. A queue of
10,000 requests is half a million objects; a step makes and drops thousands, none in cycles."""


def settle_garbage_collector() -> None:
    """What exists now stays as long as the process: do not look at it again; look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
