"""Run requests through the stateful kernels step by step, in any chunks and any company."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from kernel_calls import Kernels
from kernel_pools import (
    AttentionPool,
    make_layout,
    make_plan,
    poisoned_pool,
    pool_view,
)

from vllm.ops.layout import StateTensor

Schedule = list[list[tuple[int, int]]]
"""Steps; a step is (request, tokens) in the order in which they stand in the batch."""


def in_chunks(num_tokens: int, chunk: int) -> Schedule:
    """Request 0 alone, ``chunk`` tokens a step."""
    return [[(0, min(chunk, num_tokens - start))] for start in range(0, num_tokens, chunk)]


def in_company(lengths: Sequence[int], seed: int) -> Schedule:
    """All requests, in random order, with random numbers of tokens in every step."""
    rng = random.Random(seed)
    left, steps = list(lengths), []
    while any(left):
        waiting = [r for r, tokens in enumerate(left) if tokens]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        step = [(r, min(left[r], rng.choice((1, 1, 3, 16, 40)))) for r in chosen]
        for r, tokens in step:
            left[r] -= tokens
        steps.append(step)
    return steps


def some_sinks(heads: int) -> torch.Tensor:
    """Scores [heads] of keys without values: of no weight, of little, of nearly all."""
    return torch.tensor([-2.0, 0.0, 1.5, 9.0, float("-inf"), 3.0, -30.0, 1.0])[:heads].clone()


@dataclass
class AttentionRun:
    """Requests' (query, key, value) over one pool, each with blocks in random order."""

    kernels: Kernels
    requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    pages_per_block: int
    window: int | None
    seed: int = 0
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None
    """Queries read keys from the last multiple of so many tokens on."""

    def __post_init__(self) -> None:
        key = self.requests[0][1]
        tokens_per_block = 16 * self.pages_per_block
        counts = [-(-len(query) // tokens_per_block) for query, _, _ in self.requests]
        self.pool = AttentionPool(
            key.dtype, key.shape[1], key.shape[2], self.pages_per_block, num_blocks=sum(counts) + 1
        )
        blocks = list(range(1, sum(counts) + 1))
        random.Random(self.seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.computed = [0] * len(counts)

    def run(self, schedule: Schedule) -> list[torch.Tensor]:
        """Outputs of each request, [tokens, heads, head_size]."""
        outputs: list[list[torch.Tensor]] = [[] for _ in self.requests]
        for step in schedule:
            self.write(step)
            rows = self.attend(step)
            for (r, _), part in zip(step, torch.split(rows, [n for _, n in step]), strict=True):
                outputs[r].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]

    def write(self, step: list[tuple[int, int]]) -> None:
        """Store the keys and values of a step; blocks behind the window are freed and poisoned."""
        for r, _ in step:
            self._free_blocks_behind_window(r)
        ranges = self._ranges(step)
        key, value = (
            torch.cat([self.requests[r][i][tokens] for r, tokens in ranges]) for i in (1, 2)
        )
        slots = [self._slot(r, t) for r, tokens in ranges for t in range(tokens.start, tokens.stop)]
        self.kernels.write_kv(key, value, self.pool.kv_cache, torch.tensor(slots))

    def attend(self, step: list[tuple[int, int]]) -> torch.Tensor:
        """Outputs of a step whose keys and values are written."""
        query = torch.cat([self.requests[r][0][tokens] for r, tokens in self._ranges(step)])
        width = max(len(table) for table in self.tables)
        rows = [self.tables[r] + [0] * (width - len(self.tables[r])) for r, _ in step]
        layout = make_layout([n for _, n in step], [self.computed[r] for r, _ in step])
        out = self.kernels.paged_attention(
            query,
            self.pool.kv_cache,
            torch.tensor(rows, dtype=torch.int32),
            layout,
            2.0 * query.shape[-1] ** -0.5,
            self.window,
            self.soft_cap,
            self.sinks,
            chunk=self.chunk,
        )
        for r, n in step:
            self.computed[r] += n
        return out

    def _ranges(self, step: list[tuple[int, int]]) -> list[tuple[int, slice]]:
        return [(r, slice(self.computed[r], self.computed[r] + n)) for r, n in step]

    def _slot(self, r: int, token: int) -> int:
        block, offset = divmod(token, self.pool.tokens_per_block)
        return self.tables[r][block] * self.pool.tokens_per_block + offset

    def _free_blocks_behind_window(self, r: int) -> None:
        first_key = 0
        if self.window is not None:
            first_key = max(0, self.computed[r] - self.window + 1)
        if self.chunk is not None:
            first_key = self.computed[r] // self.chunk * self.chunk
        for i in range(first_key // self.pool.tokens_per_block):
            self.pool.pool[self.tables[r][i]] = -1
            self.tables[r][i] = 0


class RecurrentInputs(NamedTuple):
    """One request's inputs of a recurrent layer: convolution, then the delta rule."""

    x: torch.Tensor
    """[tokens, channels]"""
    a: torch.Tensor
    b: torch.Tensor
    """[tokens, v_heads]"""


@dataclass(frozen=True)
class RecurrentLayer:
    """Weights and sizes of a recurrent layer with random values."""

    dtype: torch.dtype
    num_k_heads: int
    num_v_heads: int
    dk: int
    dv: int
    width: int = 4
    weights: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        weights = {
            "conv": torch.randn(self.channels, self.width).to(self.dtype) * 0.5,
            "bias": torch.randn(self.channels).to(self.dtype),
            "a_log": torch.randn(self.num_v_heads),
            "dt_bias": torch.randn(self.num_v_heads).to(self.dtype),
        }
        object.__setattr__(self, "weights", weights)

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.dk + self.num_v_heads * self.dv

    def inputs(self, num_tokens: int) -> RecurrentInputs:
        x = torch.randn(num_tokens, self.channels).to(self.dtype)
        a, b = torch.randn(2, num_tokens, self.num_v_heads).to(self.dtype)
        return RecurrentInputs(x, a, b)

    def views(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([blocks, width - 1, channels], [blocks, v_heads, dk, dv]) of a pool's bytes."""
        size = self.dtype.itemsize
        conv = pool_view(
            pool, self.dtype, (self.width - 1, self.channels), (self.channels * size, size)
        )
        state = pool_view(
            pool,
            torch.float32,
            (self.num_v_heads, self.dk, self.dv),
            (4 * self.dk * self.dv, 4 * self.dv, 4),
            self.conv_bytes,
        )
        return conv, state

    @property
    def conv_bytes(self) -> int:
        return -(-(self.width - 1) * self.channels * self.dtype.itemsize // 4) * 4

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        pending_bytes = 16 * (4 * self.channels + 4 * self.num_v_heads)  # at most
        return poisoned_pool(num_blocks, self.conv_bytes + self._state_bytes + pending_bytes + 64)

    @property
    def _state_bytes(self) -> int:
        return 4 * self.num_v_heads * self.dk * self.dv

    def pending(self, pool: torch.Tensor, kernels: Kernels) -> list[torch.Tensor]:
        """Views of what ``kernels`` keep beside the state."""
        views, offset = [], self.conv_bytes + self._state_bytes
        for shape, dtype in self._pending_tensors(kernels):
            strides = tuple(math.prod(shape[i:]) * dtype.itemsize for i in range(1, len(shape) + 1))
            views.append(pool_view(pool, dtype, shape, strides, offset))
            offset += -(-shape[0] * strides[0] // 4) * 4
        return views

    def _pending_tensors(self, kernels: Kernels) -> tuple[StateTensor, ...]:
        heads = (self.num_k_heads, self.num_v_heads, self.dk, self.dv)
        return kernels.delta_rule_pending(self.dtype, *heads)

    def kept(
        self, pool: torch.Tensor, kernels: Kernels, block: int, num_tokens: int
    ) -> list[torch.Tensor]:
        """Everything that counts of the state in ``block`` after ``num_tokens`` tokens."""
        conv, state = self.views(pool)
        if not self._pending_tensors(kernels):
            return [conv[block], state[block]]
        keys, updates, decays = self.pending(pool, kernels)
        chunk = keys.shape[2]
        rest = num_tokens % chunk
        pending = [part[block, :, :rest] for part in (keys, updates, decays)]
        parts = [conv[block], *pending]
        return parts if num_tokens < chunk else [*parts, from_halves(state[block])]

    def whole_state(
        self, pool: torch.Tensor, kernels: Kernels, block: int, num_tokens: int
    ) -> torch.Tensor:
        """The state [v_heads, dk, dv] after ``num_tokens`` tokens, float64."""
        _, state = self.views(pool)
        if not self._pending_tensors(kernels):
            return state[block].double()
        keys, updates, decays = (part[block].double() for part in self.pending(pool, kernels))
        chunk = keys.shape[1]
        whole = from_halves(state[block]) if num_tokens >= chunk else torch.zeros(state.shape[1:])
        rest = num_tokens % chunk
        if not rest:
            return whole.double()
        decay = decays[:, rest - 1]
        whole = whole * torch.exp(decay)[:, None, None]
        for j in range(rest):
            key = keys[:, j].repeat_interleave(self.num_v_heads // self.num_k_heads, dim=0)
            update = updates[:, j] * torch.exp(decay - decays[:, j])[:, None]
            whole = whole + key[:, :, None] * update[:, None, :]
        return whole

    def fill_state(
        self,
        pool: torch.Tensor,
        kernels: Kernels,
        block: int,
        num_tokens: int,
        values: torch.Tensor | None = None,
    ) -> None:
        """A state after ``num_tokens`` tokens, random but for ``values`` [v_heads, dk, dv]."""
        _, state = self.views(pool)
        values = torch.randn(state.shape[1:]) if values is None else values
        state[block] = to_halves(values) if self._pending_tensors(kernels) else values
        if not self._pending_tensors(kernels):
            return
        keys, updates, decays = self.pending(pool, kernels)
        rest = num_tokens % keys.shape[2]
        keys[block, :, :rest] = torch.randn(self.num_k_heads, rest, self.dk).to(self.dtype)
        updates[block, :, :rest] = torch.randn(self.num_v_heads, rest, self.dv)
        decays[block, :, :rest] = -torch.rand(self.num_v_heads, rest).cumsum(1)


def to_halves(states: torch.Tensor) -> torch.Tensor:
    """States [..., dk, dv] as the pool keeps them where tokens can be pending.

    Rows 2s and 2s + 1: first their values rounded to 16 bits, in pairs, then their low halves
    (csrc/cpu/state_halves.h). An odd last row stays.
    """
    bits = states.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    even = states.shape[-2] // 2 * 2
    upper, lower = bits[..., 0:even:2, :], bits[..., 1:even:2, :]
    rounded = (upper + 0x8000 >> 16 & 0xFFFF) | (lower + 0x8000 & 0xFFFF0000)
    low = (upper & 0xFFFF) | (lower & 0xFFFF) << 16
    return _float_of_bits(torch.cat((rounded, low, bits[..., even:, :]), dim=-2))


def from_halves(stored: torch.Tensor) -> torch.Tensor:
    """The opposite of :func:`to_halves`."""
    bits = stored.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    pairs = stored.shape[-2] // 2
    rounded, low = bits[..., :pairs, :], bits[..., pairs : 2 * pairs, :]
    states = bits.clone()
    for row in range(2):
        high, rest = (part >> 16 * row & 0xFFFF for part in (rounded, low))
        signed = rest - (rest >> 15 << 16)
        states[..., row : 2 * pairs : 2, :] = (high << 16) + signed & 0xFFFFFFFF
    return _float_of_bits(states)


def _float_of_bits(bits: torch.Tensor) -> torch.Tensor:
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


@dataclass
class RecurrentRun:
    """Requests through one recurrent layer; request r has its state in block r + 1.

    ``snapshots[r]`` maps numbers of tokens to blocks. ``resume[r]`` is (tokens, block): the
    request starts there, with the state of that block copied to its own.
    """

    kernels: Kernels
    layer: RecurrentLayer
    requests: Sequence[RecurrentInputs]
    pool: torch.Tensor
    snapshots: dict[int, dict[int, int]] = field(default_factory=dict)
    resume: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, schedule: Schedule) -> list[torch.Tensor]:
        """Outputs of each request from where it starts, [tokens, v_heads, dv]."""
        self.computed = [self.resume.get(r, (0, 0))[0] for r in range(len(self.requests))]
        for r, (_, block) in self.resume.items():
            self.pool[r + 1] = self.pool[block]
        outputs: list[list[torch.Tensor]] = [[] for _ in self.requests]
        for step in schedule:
            rows = self.step(step)
            for (r, _), part in zip(step, torch.split(rows, [n for _, n in step]), strict=True):
                outputs[r].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]

    def step(self, step: list[tuple[int, int]]) -> torch.Tensor:
        ranges = [(r, slice(self.computed[r], self.computed[r] + n)) for r, n in step]
        x, a, b = (
            torch.cat([self.requests[r][i][tokens] for r, tokens in ranges]) for i in range(3)
        )
        layout = make_layout([n for _, n in step], [self.computed[r] for r, _ in step])
        plan = make_plan(
            [r + 1 for r, _ in step],
            [self.computed[r] > 0 for r, _ in step],
            [self._snapshots(r, tokens) for r, tokens in ranges],
        )
        weights = self.layer.weights
        conv_cache, state_cache = self.layer.views(self.pool)
        qkv = self.kernels.causal_conv1d(
            x, weights["conv"], weights["bias"], conv_cache, layout, plan
        )
        out = self.kernels.gated_delta_rule(
            qkv,
            a,
            b,
            weights["a_log"],
            weights["dt_bias"],
            state_cache,
            self.layer.num_k_heads,
            layout,
            plan,
            self.layer.pending(self.pool, self.kernels),
        )
        for r, n in step:
            self.computed[r] += n
        return out

    def _snapshots(self, r: int, tokens: slice) -> list[tuple[int, int]]:
        own = sorted(self.snapshots.get(r, {}).items())
        return [(n - tokens.start, block) for n, block in own if tokens.start < n <= tokens.stop]
