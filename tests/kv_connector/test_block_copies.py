"""Whole blocks to host memory and back, beside the computation."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine import fake_card as cards
from tests.engine.card_order import AtOnce, Late
from tests.engine.fake_card import fake_card
from vllm.utils import host_memory
from vllm.v1.kv_offload.block_copies import BlockCopies, BlockCopy, neighbours


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=lambda c: c[0]))
def test_neighbours_are_the_copies_in_fewest_pieces(pairs: list[tuple[int, int]]) -> None:
    runs = list(neighbours(BlockCopy(*pair) for pair in pairs))
    assert [(s + i, b + i) for s, b, count in runs for i in range(count)] == sorted(pairs)
    ends = {(s + count, b + count) for s, b, count in runs}
    assert not ends & {(s, b) for s, b, _ in runs}


def test_blocks_come_back() -> None:
    pool = torch.randint(-99, 99, (9, 40), dtype=torch.int8)
    copies = BlockCopies(pool, 6, "")
    before = pool.clone()
    copies.save([BlockCopy(5, 2), BlockCopy(1, 7), BlockCopy(2, 8)])
    pool.zero_()
    copies.load([BlockCopy(2, 3), BlockCopy(5, 4), BlockCopy(1, 2)])
    assert torch.equal(pool[[3, 4, 2]], before[[8, 2, 7]])
    assert not pool[[0, 1, 5, 6, 7, 8]].any()


def is_right_on_a_card(order: AtOnce, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Steps that fill a block, save it, fill it anew and load the old content elsewhere."""
    with fake_card(monkeypatch, order):
        pool = torch.zeros(4, 8, dtype=torch.int8, device=cards.CARD)
        copies = BlockCopies(pool, 4, "")
        found = []
        for step in range(3):
            copies.end_saves()
            pool[1].fill_(step + 1)
            copies.save([BlockCopy(step, 1)])
        copies.end_saves()
        pool[1].fill_(77)
        copies.load([BlockCopy(1, 2), BlockCopy(0, 3)])
        found = (pool + 0).cpu().tolist()
        order.finish()
    return found == [[0] * 8, [77] * 8, [2] * 8, [1] * 8]


def test_the_pool_and_the_copies_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(is_right_on_a_card(Late(seed), monkeypatch) for seed in range(8))
    monkeypatch.setattr(BlockCopies, "end_saves", lambda self: None)
    assert not all(is_right_on_a_card(Late(seed), monkeypatch) for seed in range(8))


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory_bytes", lambda: 2**22)
    pool = torch.zeros(4, 2**20, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"host memory of 5\.00 MiB .* 4\.00 MiB .*: buy some"):
        BlockCopies(pool, 5, "buy some")
    BlockCopies(pool, 4, "buy some")
    with fake_card(monkeypatch, AtOnce()):
        pool = torch.zeros(4, 2**20, dtype=torch.int8, device=cards.CARD)
        with pytest.raises(ValueError, match=r"pinned host memory of 5\.00 MiB"):
            BlockCopies(pool, 5, "buy some")


def test_memory_is_taken_at_once() -> None:
    """Nothing is left to fault in, whatever the size of pages."""
    memory = host_memory.allocate_host_bytes(2**25 + 4097, "", "", touched=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.fill_(3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8
