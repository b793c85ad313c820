"""Python's garbage collector in processes that keep many requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 20)
"""Numbers of new objects, and of collections of each younger generation, before a collection. A
queue of 10,000 requests is half a million objects; a step makes and drops thousands, none in
cycles."""


def collect_less_often() -> None:
    """Collect less often: imports take a tenth less time. For processes of this package alone."""
    gc.set_threshold(*_THRESHOLDS)


def settle_garbage_collector() -> None:
    """Exclude all present objects, which stay as long as the process, and collect less often."""
    gc.collect()
    gc.freeze()
    collect_less_often()


@contextmanager
def garbage_collected_later() -> Iterator[None]:
    """Let no collection begin inside of the block, which makes many objects and none in cycles.

    With Python's own limits, looking through all objects of the program takes a fifth of the time
    in which short prompts are extracted.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable collection during imports: modules stay, and checking them is an eighth of the time.

    Afterwards the new objects count as old ones, so that the next collection does not check them.
    """
    is_enabled = gc.isenabled()
    with garbage_collected_later():
        try:
            yield
        finally:
            # Frozen objects are frozen on purpose. Counting them takes longer than reading a config
            # whose modules are there.
            is_much = gc.get_count()[0] > _THRESHOLDS[0]
            if is_enabled and is_much and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
