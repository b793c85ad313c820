"""Memory of ranks by the formula of docs/parallel.md, and the way of a plan to eight of them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.engine.rank_costs import (
    LARGE,
    MIB,
    POOL_BYTES,
    SIZES,
    measure_calls,
    measure_memory,
    measure_plans,
)

pytestmark = pytest.mark.exhaustive

MOST_OTHER = 12 * MIB
"""Memory that a rank of the larger model may need beyond its weights: activations, leftovers."""


@pytest.mark.parametrize(("tensor", "stages"), SIZES)
def test_a_rank_has_its_share_of_the_weights_and_its_pool(
    tensor: int, stages: int, tmp_path: Path
) -> None:
    found = measure_memory(tmp_path, tensor, stages)
    layers = LARGE["num_hidden_layers"]
    whole, largest = sum(one.weights for one in found), -(-layers // stages) / layers
    for one in found:
        assert one.weights <= largest * whole / tensor + MIB
        assert one.grown <= one.weights + MOST_OTHER
        # A stage writes the places of its own layers.
        assert abs(one.pool * largest - POOL_BYTES) <= 4 * MIB
    assert [one.rank for one in found] == list(range(tensor * stages))


def test_plans_reach_eight_ranks(tmp_path: Path) -> None:
    """On a machine with fewer cores they come one after another."""
    times = measure_plans(tmp_path, ranks=8, steps=40)
    assert all(one.sending > 0 and one.there > 0 for one in times)
    assert statistics.median(one.there for one in times) < 0.1


def test_calls_reach_processes_that_wait() -> None:
    times = measure_calls(ranks=8, steps=100)
    assert statistics.median(one.there for one in times) < 0.02
