"""The state-space recurrence keeps a request's bits, and keeps to its own blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from kernel_calls import Kernels
from kernel_pools import make_layout, make_plan, poisoned_pool, pool_view, strided

from vllm.ops.layout import StatePlan
from vllm.ops.state_space import state_space_scan

NUM_TOKENS = 75
CUTS = [[75], [1, 74], [16, 16, 43], [37, 1, 1, 36], [15, 17, 43], [1] * 20 + [55]]


class Sizes(NamedTuple):
    heads: int
    groups: int
    state_size: int
    head_dim: int


SIZES = [Sizes(4, 2, 16, 16), Sizes(5, 1, 13, 20), Sizes(2, 2, 32, 72)]


@dataclass
class Layer:
    """One layer's inputs for a request, and its states in a pool of NaN."""

    kernels: Kernels
    sizes: Sizes
    dtype: torch.dtype

    def __post_init__(self) -> None:
        heads, groups, state_size, head_dim = self.sizes
        width = heads * head_dim + 2 * groups * state_size
        self.xbc = strided(torch.randn(NUM_TOKENS, width).to(self.dtype))
        self.dt = strided(torch.randn(NUM_TOKENS, heads).to(self.dtype))
        self.head_values = torch.randn(3, heads)
        self.new_pool()

    def new_pool(self) -> None:
        heads, _, state_size, head_dim = self.sizes
        state_bytes = 4 * heads * state_size * head_dim
        self.pool = poisoned_pool(12, state_bytes + 64)
        strides = (4 * state_size * head_dim, 4 * head_dim, 4)
        shape = (heads, state_size, head_dim)
        self.states = pool_view(self.pool, torch.float32, shape, strides, 32)

    def run(
        self, tokens: Sequence[range], plan: StatePlan, contexts: Sequence[int]
    ) -> torch.Tensor:
        """A step over these tokens of the inputs, request after request; the rows of all."""
        heads, groups, _, head_dim = self.sizes
        layout = make_layout([len(each) for each in tokens], contexts)
        rows = torch.tensor([t for each in tokens for t in each], dtype=torch.int64)
        out = torch.full((len(rows), heads, head_dim), math.nan, dtype=self.dtype)
        xbc, dt = strided(self.xbc[rows]), strided(self.dt[rows])
        state_space_scan.run(
            self.kernels.implementation(state_space_scan),
            *(xbc, dt, *self.head_values, groups, 0.0, math.inf, layout, plan, self.states, out),
        )
        return out


@pytest.fixture(params=SIZES, ids=str)
def layer(request: pytest.FixtureRequest, kernels: Kernels, dtype: torch.dtype) -> Layer:
    return Layer(kernels, request.param, dtype)


def test_cuts_and_company_change_no_bit(layer: Layer) -> None:
    found = []
    for cut in CUTS:
        layer.new_pool()
        rows, start = [], 0
        for size in cut:
            # Beside it two others, of which one begins and one goes on.
            tokens = [range(3), range(start, start + size), range(2)]
            plan = make_plan([5, 2, 7], [False, start > 0, start > 0])
            rows.append(layer.run(tokens, plan, [0, start, 2 * start])[3 : 3 + size])
            start += size
        found.append((torch.cat(rows), layer.states[2].clone()))
    for rows_of_cut, state in found[1:]:
        assert torch.equal(rows_of_cut, found[0][0]) and torch.equal(state, found[0][1])


def test_snapshots_are_the_states_at_their_tokens(layer: Layer) -> None:
    at = [1, 16, 33, 48, NUM_TOKENS]
    kept = [(tokens, 3 + i) for i, tokens in enumerate(at)]
    whole = layer.run([range(NUM_TOKENS)], make_plan([1], [False], [kept]), [0])
    states = layer.states.clone()
    assert torch.equal(states[1], states[kept[-1][1]])
    for tokens, block in kept[:-1]:
        layer.new_pool()
        layer.run([range(tokens)], make_plan([1], [False]), [0])
        assert torch.equal(layer.states[1], states[block])
        rest = layer.run([range(tokens, NUM_TOKENS)], make_plan([1], [True]), [tokens])
        assert torch.equal(rest, whole[tokens:])


def test_nothing_but_its_blocks_is_written(layer: Layer) -> None:
    plan = make_plan([1, 4], [False, False], [[(7, 6)], []], [True, False])
    layer.run([range(20), range(9)], plan, [0, 0])
    written = [block for block in range(12) if not layer.states[block].isnan().all()]
    if layer.kernels.name != "plain":  # whose body writes a state that nobody reads
        assert written == [4, 6]
    layer.states.view(torch.int32)[written] = -1
    assert torch.equal(layer.pool, poisoned_pool(*layer.pool.shape))


def test_a_request_without_tokens_keeps_its_state(layer: Layer) -> None:
    layer.states[3] = 1.5
    layer.run([range(4), range(0)], make_plan([1, 3], [False, True]), [0, 11])
    assert (layer.states[3] == 1.5).all()


def test_blocks_outside_of_the_pool_are_an_error(kernels: Kernels) -> None:
    if kernels.name == "plain":
        pytest.skip("torch checks")
    layer = Layer(kernels, SIZES[0], torch.float32)
    for plan in (make_plan([12], [False]), make_plan([1], [False], [[(2, -1)]])):
        with pytest.raises(RuntimeError, match="state_space_scan: a slot, block id"):
            layer.run([range(4)], plan, [0])
