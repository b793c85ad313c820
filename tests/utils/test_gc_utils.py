"""The garbage collector while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vllm.utils.gc_utils import without_garbage_collection


class _Made:
    """Something that the collector looks at."""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def _is_young(made: _Made) -> bool:
    return any(each is made for each in gc.get_objects(generation=0))


MANY = 60_000


def test_what_is_made_is_not_looked_at_first_thing() -> None:
    gc.unfreeze()
    gc.enable()
    with without_garbage_collection():
        assert not gc.isenabled()
        made, *_ = [_Made() for _ in range(MANY)]
        assert _is_young(made)
    assert gc.isenabled() and not _is_young(made) and gc.get_freeze_count() == 0
    assert any(each is made for each in gc.get_objects(generation=2))


def test_what_somebody_froze_stays_frozen() -> None:
    gc.enable()
    gc.freeze()
    count = gc.get_freeze_count()
    with without_garbage_collection():
        made = [_Made() for _ in range(MANY)]
    assert gc.isenabled() and gc.get_freeze_count() > count // 2
    del made


def test_frozen_objects_are_not_counted_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    monkeypatch.delattr(gc, "get_freeze_count")
    with without_garbage_collection():
        pass
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with without_garbage_collection():
        pass
    assert not gc.isenabled()
