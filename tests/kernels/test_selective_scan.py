"""Mamba's selective scan over a poisoned pool: values, and bits whatever the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from kernel_calls import Kernels, poisoned
from kernel_pools import assert_only_changed, make_layout, make_plan, poisoned_pool, pool_view
from kernel_reference import assert_near
from kernel_steps import in_chunks, in_company

from vllm.ops.selective_scan import selective_scan

SHAPES = [(8, 1, 16), (33, 1, 5), (200, 2, 13), (130, 1, 1)]


class Scan(NamedTuple):
    """One layer: (channels, groups, state_size), and the inputs of some requests."""

    rates: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    requests: list[tuple[torch.Tensor, ...]]
    """x, step, b, c, gate"""

    @classmethod
    def make(cls, dtype: torch.dtype, shape: tuple[int, int, int], lengths: Sequence[int]) -> Scan:
        channels, groups, size = shape
        widths = ((channels,), (channels,), (groups, size), (groups, size), (channels,))
        requests = [tuple(torch.randn(n, *w).to(dtype) for w in widths) for n in lengths]
        rates = -torch.exp(torch.randn(size, channels))
        return cls(rates, *torch.randn(2, channels), requests)

    def views(self, pool: torch.Tensor) -> torch.Tensor:
        size, channels = self.rates.shape
        return pool_view(pool, torch.float32, (size, channels), (4 * channels + 8, 4), 12)

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        size, channels = self.rates.shape
        return poisoned_pool(num_blocks, 4 * size * (channels + 2) + 64)

    def step(
        self,
        kernels: Kernels,
        pool: torch.Tensor,
        ranges: Sequence[tuple[int, slice]],
        snapshots: Any = None,
        is_final: Any = None,
    ) -> torch.Tensor:
        """Some tokens of some requests; request r has its state in block r + 1."""
        inputs = [torch.cat([self.requests[r][i][own] for r, own in ranges]) for i in range(5)]
        layout = make_layout(
            [own.stop - own.start for _, own in ranges], [o.start for _, o in ranges]
        )
        blocks, has_state = [r + 1 for r, _ in ranges], [own.start > 0 for _, own in ranges]
        plan = make_plan(blocks, has_state, snapshots, is_final)
        out = poisoned(inputs[0], inputs[0].shape)
        weights = (self.rates, self.step_bias, self.skip)
        selective_scan.run(
            kernels.implementation(selective_scan),
            *(*inputs, *weights, layout, plan, self.views(pool), out),
        )
        return out

    def expected(self, r: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of request r and the state after each token, in float64."""
        x, step, b, c, gate = (part.double() for part in self.requests[r])
        per_group = x.shape[1] // b.shape[1]
        outputs, states = [], []
        for t in range(len(x)):
            delta = torch.log1p(torch.exp(step[t] + self.step_bias.double()))
            keys, queries = (v[t].t().repeat_interleave(per_group, dim=1) for v in (b, c))
            state = torch.exp(delta * self.rates.double()) * state + keys * (delta * x[t])
            y = (queries * state).sum(0) + self.skip.double() * x[t]
            outputs.append(y * gate[t] * torch.sigmoid(gate[t]))
            states.append(state)
        return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_states(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    scan = Scan.make(dtype, shape, [20, 1, 33])
    pool = scan.new_pool(8)
    scan.views(pool)[2] = torch.randn(scan.rates.shape)
    before = pool.clone()
    ranges = [(0, slice(0, 20)), (1, slice(7, 8)), (2, slice(0, 33))]
    scan.requests[1] = tuple(part.expand(8, *part.shape[1:]) for part in scan.requests[1])
    snapshots = [[(3, 5), (20, 6)], [], [(16, 7)]]
    out = scan.step(kernels, pool, ranges, snapshots, is_final=[False, False, True])
    expected, written = [], []
    for (r, own), kept in zip(ranges, snapshots, strict=True):
        scan.requests[r] = tuple(part[own] for part in scan.requests[r])
        state = scan.views(before)[2].double() if r == 1 else torch.zeros(scan.rates.shape)
        outputs, states = scan.expected(r, state.double())
        expected.append(outputs)
        targets = [*kept, (own.stop - own.start, r + 1)][: None if r < 2 else -1]
        for tokens, block in targets:
            assert_near(scan.views(pool)[block], states[tokens - 1], torch.float32)
            written.append((scan.views(before)[block], scan.views(pool)[block]))
    assert_near(out, torch.cat(expected), dtype)
    written.append((scan.views(before)[3], scan.views(pool)[3]))  # nobody reads it
    assert_only_changed(before, pool, written)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_steps(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    lengths = [70, 33, 5]
    scan = Scan.make(dtype, shape, lengths)
    seen = []
    for schedule in (
        in_chunks(70, 70),
        in_chunks(70, 1),
        in_chunks(70, 33),
        in_company(lengths, 3),
    ):
        pool, computed, rows = scan.new_pool(5), [0] * 3, []
        for step in schedule:
            ranges = [(r, slice(computed[r], computed[r] + n)) for r, n in step]
            out = scan.step(kernels, pool, ranges)
            for (r, own), part in zip(ranges, torch.split(out, [n for _, n in step]), strict=True):
                computed[r] = own.stop
                rows += [part] if r == 0 else []
        seen.append((torch.cat(rows), scan.views(pool)[1].clone()))
    for outputs, state in seen[1:]:
        assert torch.equal(outputs, seen[0][0]) and torch.equal(state, seen[0][1])
