"""A worker remembers the blocks of its requests."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.sampling_params import SamplingParams
from vllm.utils.token_spread import TokenSpread
from vllm.v1.worker.input_batch import RequestState, make_batch, own_slots


def test_first_blocks_follow_the_tables() -> None:
    tables_of = {"one": [[5, 6], [], [8]], "two": [[3], [4, 7], [9]]}
    one, two = (
        RequestState(name, [1, 2], SamplingParams(), None, tables)
        for name, tables in tables_of.items()
    )
    batch = make_batch([one, two], [0, 0], [2, 2])
    one.add_blocks([[9], [4], []])
    two.add_blocks([[], [1], [2]])
    assert batch.first_blocks([0, 1, 2]).tolist() == [[5, 3], [4, 4], [8, 9]]
    one.add_blocks([[], [6], [7]])
    assert batch.first_blocks([1, 0]).tolist() == [[4, 4], [5, 3]]
    one.replace_blocks([[2], [1], [0]])
    assert batch.first_blocks([2, 1, 0]).tolist() == [[0, 9], [1, 4], [2, 3]]
    for group_id in range(3):
        tables = batch.block_table(group_id)
        assert tables[:, 0].tolist() == batch.first_blocks([group_id])[0].tolist()


@pytest.mark.parametrize("spread", [TokenSpread(2), TokenSpread(3, 4)])
def test_every_token_has_a_slot_on_one_rank(spread: TokenSpread) -> None:
    """Blocks have 16 tokens on each rank."""
    tables = [[3, 1, 4, 5], [2, 7]]
    states = [
        RequestState(str(r), [1] * 100, SamplingParams(), None, [table])
        for r, table in enumerate(tables)
    ]
    batch = make_batch(states, [0, 7], [16 * spread.ranks * 2 + 3, 20])
    whole = batch.slots(batch.block_table(0), 16 * spread.ranks)
    by_rank = np.stack([own_slots(whole, spread, rank) for rank in range(spread.ranks)])
    assert ((by_rank >= 0).sum(axis=0) == 1).all()
    for token, position in enumerate(batch.positions.tolist()):
        rank, place = spread.rank_of(position), spread.place_of(position)
        block = tables[batch.request_of_token[token]][place // 16]
        assert by_rank[rank, token] == block * 16 + place % 16


def test_tokens_that_a_request_does_not_have_are_not_read() -> None:
    states = [
        RequestState(name, tokens, SamplingParams(), None, [[1]])
        for name, tokens in (("one", [1, 2, 3]), ("two", [4]))
    ]
    with pytest.raises(RuntimeError, match="4 tokens are scheduled, and requests have 3"):
        make_batch(states, [1, 0], [2, 2])
