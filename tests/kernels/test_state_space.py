"""The state-space recurrence keeps a request's bits, and keeps to its own blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kernel_reference as reference
import pytest
import torch
from kernel_calls import Kernels
from kernel_pools import make_layout, make_plan, poisoned_pool, pool_view, strided
from kernel_steps import from_halves, to_halves

from vllm.ops.layout import PENDING_TOKENS, StatePlan, StateTensor
from vllm.ops.state_space import state_space_scan

NUM_TOKENS = 75
CUTS = [
    [75],
    [1, 74],
    [16, 16, 43],
    [37, 1, 1, 36],
    [15, 17, 43],
    [1] * 20 + [55],
    [29] + [1] * 36 + [3, 7],
]


class Sizes(NamedTuple):
    heads: int
    groups: int
    state_size: int
    head_dim: int


SIZES = [
    Sizes(4, 2, 16, 16),
    Sizes(5, 1, 13, 20),
    Sizes(2, 2, 32, 72),
    Sizes(10, 1, 38, 64),
    Sizes(4, 2, 33, 192),
]


def _strides(kind: StateTensor) -> tuple[int, ...]:
    """In bytes, of a dense tensor."""
    return tuple(s * kind.dtype.itemsize for s in torch.empty(kind.shape, device="meta").stride())


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
        heads, groups, state_size, head_dim = self.sizes
        kinds = [StateTensor((heads, state_size, head_dim), torch.float32)]
        kinds += self.kernels.state_space_pending(self.dtype, heads, head_dim, groups, state_size)
        sizes = [-(-math.prod(shape) * dtype.itemsize // 4) * 4 for shape, dtype in kinds]
        self.pool = poisoned_pool(12, sum(sizes) + 64)
        self.states, *self.pending = (
            pool_view(self.pool, kind.dtype, kind.shape, _strides(kind), 32 + sum(sizes[:place]))
            for place, kind in enumerate(kinds)
        )

    def kept(self, block: int, num_tokens: int) -> list[torch.Tensor]:
        """Copies of what counts of a block after so many tokens."""
        if not self.pending:
            return [self.states[block].clone()]
        rest = num_tokens % PENDING_TOKENS
        parts = [view[block, :rest].clone() for view in self.pending]
        whole = [] if num_tokens < PENDING_TOKENS else [from_halves(self.states[block])]
        return whole + parts

    def whole_state(self, block: int, num_tokens: int) -> torch.Tensor:
        """The state after so many tokens, float64."""
        if not self.pending:
            return self.states[block].double()
        *whole, rows, steps = (part.double() for part in self.kept(block, num_tokens))
        heads, groups, state_size, head_dim = self.sizes
        state = whole[0] if whole else torch.zeros(heads, state_size, head_dim).double()
        unread = rows.new_zeros(len(rows), groups * state_size)
        states = self.recurrence(torch.cat((rows, unread), 1), steps, state)[1]
        return states[-1] if len(states) else state

    def recurrence(
        self, xbc: torch.Tensor, dt: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = (each.double() for each in self.head_values)
        return reference.state_space(xbc, dt, *values, state, self.sizes.groups)

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
            *(xbc, dt, *self.head_values, groups, 0.0, math.inf, layout, plan),
            *(self.states, self.pending, out),
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
        found.append((torch.cat(rows), *layer.kept(2, NUM_TOKENS)))
    for parts in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(parts, found[0], strict=True))


def test_rows_and_states_are_those_of_the_recurrence(layer: Layer) -> None:
    """Products of pairs round the state and what is added to it, as a row is rounded itself."""
    heads, _, state_size, head_dim = layer.sizes
    zeros = torch.zeros(heads, state_size, head_dim).double()
    expected, states = layer.recurrence(layer.xbc.double(), layer.dt.double(), zeros)
    found, start = [], 0
    for size in (29, 1, 1, 44):
        plan = make_plan([1], [start > 0], [[(1, 2)]])
        found.append(layer.run([range(start, start + size)], plan, [start]))
        for block, tokens in ((1, start + size), (2, start + 1)):
            state = layer.whole_state(block, tokens)
            near = 2**-8 if layer.pending else 1e-5
            assert relative_rms(state, states[tokens - 1]) <= near
        start += size
    if layer.pending:
        assert relative_rms(torch.cat(found), expected) <= 2**-8
    else:
        reference.assert_near(torch.cat(found), expected, layer.dtype)


def test_tokens_that_forget_everything(layer: Layer) -> None:
    """Their decays are zeros, and what stands behind them in a chunk keeps its digits."""
    heads, _, state_size, head_dim = layer.sizes
    layer.head_values[0] += 7.0
    layer.dt.sub_(10.0)
    layer.dt[3::5] = 200.0
    zeros = torch.zeros(heads, state_size, head_dim).double()
    expected, _ = layer.recurrence(layer.xbc.double(), layer.dt.double(), zeros)
    rows = layer.run([range(NUM_TOKENS)], make_plan([1], [False]), [0])
    if layer.pending:
        assert relative_rms(rows, expected) <= 2**-8
    else:
        reference.assert_near(rows, expected, layer.dtype)


@pytest.mark.parametrize("tokens", [16, 1])
def test_states_that_decay_become_zeros(native: Kernels, dtype: torch.dtype, tokens: int) -> None:
    """They never hold subnormal numbers, which take many CPUs a hundred times as long."""
    layer = Layer(native, SIZES[1], dtype)
    heads, _, state_size, head_dim = layer.sizes
    values = torch.full((heads, state_size, head_dim), 2e-38)
    layer.states[1] = to_halves(values) if layer.pending else values
    layer.xbc.zero_()
    layer.head_values.zero_()
    layer.dt.fill_(-1.5)  # 0.04 is left of a state
    for first in range(0, 16, tokens):
        layer.run([range(first, first + tokens)], make_plan([1], [True]), [32 + first])
    assert (layer.whole_state(1, 48) == 0).all()


def float_of_poison(dtype: torch.dtype) -> torch.Tensor:
    """The number that a pool's bytes read as before they are written."""
    return torch.full((dtype.itemsize,), -1, dtype=torch.int8).view(dtype)


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference, in units of the expected values' RMS."""
    return float((found.double() - expected).norm() / expected.norm())


def test_snapshots_are_the_states_at_their_tokens(layer: Layer) -> None:
    at = [1, 16, 33, 48, NUM_TOKENS]
    kept = [(tokens, 3 + i) for i, tokens in enumerate(at)]
    whole = layer.run([range(NUM_TOKENS)], make_plan([1], [False], [kept]), [0])
    saved = {block: layer.kept(block, tokens) for tokens, block in (*kept, (NUM_TOKENS, 1))}
    assert all(torch.equal(*pair) for pair in zip(saved[1], saved[kept[-1][1]], strict=True))
    for tokens, block in kept[:-1]:
        layer.new_pool()
        layer.run([range(tokens)], make_plan([1], [False]), [0])
        own = layer.kept(1, tokens)
        assert all(torch.equal(*pair) for pair in zip(own, saved[block], strict=True))
        rest = layer.run([range(tokens, NUM_TOKENS)], make_plan([1], [True]), [tokens])
        assert torch.equal(rest, whole[tokens:])


def test_nothing_but_its_blocks_is_written(layer: Layer) -> None:
    plan = make_plan([1, 4], [False, False], [[(7, 6)], []], [True, False])
    layer.run([range(20), range(9)], plan, [0, 0])
    written = [block for block in range(12) if not (layer.pool[block] == -1).all()]
    if layer.kernels.name != "plain":  # whose body writes a state that nobody reads
        assert written == [4, 6]
    for view in (layer.states, *layer.pending):
        view[written] = float_of_poison(view.dtype)
    assert torch.equal(layer.pool, poisoned_pool(*layer.pool.shape))


def test_a_request_without_tokens_keeps_its_state(layer: Layer) -> None:
    layer.states[3] = 1.5
    layer.run([range(4), range(0)], make_plan([1, 3], [False, True]), [0, 11])
    assert (layer.states[3] == 1.5).all()


def test_blocks_outside_of_the_pool_are_an_error(native: Kernels) -> None:
    layer = Layer(native, SIZES[0], torch.float32)
    for plan in (make_plan([12], [False]), make_plan([1], [False], [[(2, -1)]])):
        with pytest.raises(RuntimeError, match="state_space_scan: a slot, block id"):
            layer.run([range(4)], plan, [0])
