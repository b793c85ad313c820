"""Places of tokens that are spread over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.utils.token_spread import WHOLE, TokenSpread


@pytest.mark.parametrize("spread", [WHOLE, TokenSpread(2), TokenSpread(3, 4), TokenSpread(4, 16)])
def test_runs_of_tokens_go_to_the_ranks_in_turn(spread: TokenSpread) -> None:
    runs: list[list[int]] = [[] for _ in range(spread.ranks)]
    for position in range(150):
        for rank, own in enumerate(runs):
            assert spread.count(position, rank) == len(own)
        rank, place = spread.rank_of(position), spread.place_of(position)
        assert rank == position // spread.interleave % spread.ranks
        assert place == len(runs[rank])
        assert spread.position_of(place, rank) == position
        runs[rank].append(position)
    for numbers in (np.arange(150), torch.arange(150)):
        assert spread.rank_of(numbers).tolist() == [spread.rank_of(i) for i in range(150)]
        assert spread.place_of(numbers).tolist() == [spread.place_of(i) for i in range(150)]
    for rank, own in enumerate(runs):
        assert spread.position_of(torch.arange(len(own)), rank).tolist() == own
