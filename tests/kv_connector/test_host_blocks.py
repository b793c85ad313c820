"""The books of host memory, whatever happens in whatever order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import Load, SavedContent
from vllm.v1.core.block_pool import BlockKey
from vllm.v1.kv_offload.eviction import POLICIES
from vllm.v1.request import Request

TOKENS, STATES = 0, 1
"""Groups."""


def request(name: str) -> Request:
    return cast(Request, SimpleNamespace(request_id=name, void_steps=0))


def key(text: str, index: int, group: int = TOKENS) -> BlockKey:
    """Key of block ``index`` of a text, whose letters are blocks."""
    return (group, text[: index + 1].encode(), 0 if group == STATES else index)


def block_of(owner: Request, text: str, index: int) -> SavedContent:
    return SavedContent(owner, [100 + index], [key(text, index)])


def state_of(owner: Request, text: str, index: int) -> SavedContent:
    return SavedContent(owner, [7, 8], [key(text, index, STATES)], is_state=True)


NOTHING = Load([], [], [])


class Store:
    """Host blocks, and a step at a time."""

    def __init__(self, num_blocks: int, policy: str, chunk: int, keeps_parts: bool = True) -> None:
        self.host = HostBlocks(num_blocks, POLICIES[policy], [chunk, 1], keeps_parts)
        self.step = 0

    def save(self, *saves: SavedContent) -> int:
        self.step += 1
        return len(self.host.place(self.step, saves))

    def run(self, text: str, name: str = "r") -> None:
        """A request from its begin to its end."""
        owner = request(name)
        self.host.begin(name, self.found(text))
        missing = [i for i in range(len(text)) if self.host.index.find(key(text, i)) is None]
        self.save(*(block_of(owner, text, i) for i in missing))
        self.host.confirm(self.step)
        self.host.end(name)
        self.host.check_integrity()

    def found(self, text: str) -> Load:
        tokens = [self.host.index.find(key(text, i)) for i in range(len(text))]
        first = next((i for i, block in enumerate(tokens) if block is None), len(text))
        found = [block for block in tokens[:first] if block is not None]
        states = [self.host.index.find(key(text, i, STATES)) for i in range(first)]
        last = next((block for block in reversed(states) if block is not None), None)
        return Load([], found, [] if last is None else self.host.index.bundle(last))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 3),
    st.booleans(),
    st.integers(5, 16),
    st.data(),
)
def test_books_agree(
    policy: str, chunk: int, keeps_parts: bool, num_blocks: int, data: st.DataObject
) -> None:
    store = Store(num_blocks, policy, chunk, keeps_parts)
    running: dict[str, tuple[Any, str, int]] = {}
    unconfirmed: list[int] = []
    for number in range(data.draw(st.integers(0, 40))):
        action = data.draw(
            st.sampled_from(["begin", "save", "save", "save", "confirm", "lose", "end", "reset"])
        )
        name = data.draw(st.sampled_from(sorted(running))) if running else None
        if action == "begin":
            owner = request(f"r{number}")
            text = data.draw(st.text("ab", min_size=1, max_size=7))
            load = store.found(text)
            store.host.begin(owner.request_id, load)
            running[owner.request_id] = owner, text, len(load.tokens)
        elif action == "save" and name is not None:
            owner, text, done = running[name]
            end = data.draw(st.integers(done, len(text)))
            saves = [block_of(owner, text, i) for i in range(done, end)]
            if end and data.draw(st.booleans()):
                saves.append(state_of(owner, text, end - 1))
            fresh = [s for s in saves if store.host.index.find(s.keys[-1]) is None]
            store.save(*fresh)
            unconfirmed.append(store.step)
            running[name] = owner, text, end
        elif action == "confirm" and unconfirmed:
            store.host.confirm(unconfirmed.pop(0))
        elif action == "lose" and unconfirmed:
            unconfirmed.pop(0)  # a step that failed
            if name is not None:
                running[name][0].void_steps = store.step
        elif action == "end" and name is not None:
            store.host.end(name)
            del running[name]
        elif action == "reset":
            store.host.forget_all()
            assert not store.host.index.blocks
        store.host.check_integrity()
    store.host.confirm(store.step)
    for name in running:
        store.host.end(name)
    store.host.check_integrity()
    assert not store.host._held and not store.host._pending and not store.host._num_held


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_gets_shorter_from_its_end(policy: str) -> None:
    store = Store(7, policy, 1)
    store.run("abcd")
    store.run("xyzw")
    assert len(store.found("abcd").tokens) == 2 and len(store.found("xyzw").tokens) == 4


def test_a_chunk_goes_as_one() -> None:
    store = Store(7, "lru", 2)
    store.run("abcd")
    store.run("xyz")
    assert len(store.found("abcd").tokens) == 2 and len(store.found("xyz").tokens) == 3


def test_what_ended_before_its_chunk_was_full_goes_where_only_whole_ones_are_found() -> None:
    store = Store(9, "lru", 3, keeps_parts=False)
    store.run("abcde")
    assert len(store.found("abcde").tokens) == 3
    store.run("abcdef")
    assert len(store.found("abcdef").tokens) == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_being_loaded_stays(policy: str) -> None:
    store = Store(5, policy, 1)
    store.run("abcd")
    store.host.begin("loading", store.found("abc"))
    store.run("wxyz", "other")
    assert len(store.found("abc").tokens) == 3 and len(store.found("w").tokens) == 1
    store.host.end("loading")
    store.run("wxyz", "again")
    assert len(store.found("wxyz").tokens) == 4


def test_two_that_save_the_same_at_once_store_it_once() -> None:
    store = Store(9, "arc", 1)
    one, two = request("one"), request("two")
    for owner in (one, two):
        store.host.begin(owner.request_id, NOTHING)
    assert store.save(block_of(one, "a", 0), block_of(two, "a", 0)) == 1
    store.host.end("one")
    store.host.confirm(store.step)
    store.host.end("two")
    assert len(store.found("a").tokens) == 1
    store.host.check_integrity()


def test_arc_keeps_prompts_that_come_again_where_lru_does_not() -> None:
    kept = {}
    for policy in POLICIES:
        store = Store(9, policy, 1)
        for _ in range(2):
            store.run("abcd")
        for number in range(20):
            store.run(chr(200 + number) * 3)
        kept[policy] = len(store.found("abcd").tokens)
    assert kept == {"lru": 0, "arc": 4}
