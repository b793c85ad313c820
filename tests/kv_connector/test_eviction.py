"""Order of eviction: the policies beside plain ones, and with contents that are held."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_offload.eviction import (
    POLICIES,
    AdaptiveReplacement,
    EvictionPolicy,
    LeastRecentlyUsed,
    find_policy,
)


def never_held(key: Hashable) -> bool:
    return False


class PublishedARC:
    """Figure 4 of the paper, line by line, over lists whose last entry is the most recent."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            self.p = min(c, self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            self.p = max(0, self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(b1) < c and len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                self.replace(x)
            t1.append(x)

    def replace(self, x: int) -> None:
        size = len(self.t1)
        if size >= 1 and ((x in self.b2 and size == self.p) or size > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def ask(policy: EvictionPolicy, key: int) -> list[Hashable]:
    if key not in policy.sizes():
        return policy.admit(key, 1, never_held)
    policy.use(key)
    return []


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=150))
def test_arc_is_the_published_algorithm(capacity: int, requests: list[int]) -> None:
    expected, policy = PublishedARC(capacity), AdaptiveReplacement(capacity)
    for key in requests:
        before = {*expected.t1, *expected.t2}
        expected.request(key)
        gone = ask(policy, key)
        assert set(gone) == before - {*expected.t1, *expected.t2}
        assert list(policy._once) == expected.t1 and list(policy._again) == expected.t2
        assert list(policy._once_gone) == expected.b1 and list(policy._again_gone) == expected.b2
        assert policy._target == pytest.approx(expected.p)


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=100))
def test_lru_keeps_the_last_ones(capacity: int, requests: list[int]) -> None:
    policy, order = LeastRecentlyUsed(capacity), list[int]()
    for key in requests:
        gone = ask(policy, key)
        order = [other for other in order if other != key] + [key]
        assert gone == order[: len(order) - capacity if len(order) > capacity else 0]
        order = order[-capacity:]
        assert list(policy.sizes()) == order


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_sizes_and_holders(name: str, data: st.DataObject) -> None:
    """Contents of any size; what is held stays, and the room is never exceeded."""
    capacity = 12
    policy = POLICIES[name](capacity)
    here: dict[Hashable, int] = {}
    held: set[Hashable] = set()
    for _ in range(data.draw(st.integers(0, 60))):
        key = data.draw(st.integers(0, 9))
        action = data.draw(st.sampled_from(["add", "add", "hold", "let go", "discard", "renew"]))
        size = data.draw(st.integers(1, 4))
        if action == "add":
            others = sum(n for k, n in here.items() if k in held or k == key)
            if others + size > capacity:
                continue
            call = policy.grow if key in here else policy.admit
            gone = call(key, size, (held | {key}).__contains__)
            assert not held & set(gone)
            for lost in gone:
                del here[lost]
            here[key] = here.get(key, 0) + size
        elif key not in here:
            continue
        elif action == "hold":
            held.add(key)
            policy.use(key)
        elif action == "let go":
            held.discard(key)
        elif action == "renew":
            policy.renew(key)
        elif size < here[key]:
            policy.discard(key, size)
            here[key] -= size
        else:
            policy.discard(key)
            del here[key]
            held.discard(key)
        assert policy.sizes() == here
        assert sum(here.values()) <= capacity


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    kept = {}
    for name, make in POLICIES.items():
        policy = make(8)
        for _ in range(3):
            for key in range(4):
                ask(policy, key)
        for key in range(100, 200):
            ask(policy, key)
        kept[name] = set(range(4)) <= set(policy.sizes())
    assert kept == {"lru": False, "arc": True}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"eviction_policy='acr' is not known.*'arc'"):
        find_policy("acr")
