"""Blocks that requests hold of a pool, against the bytes of what they keep.

After a step, a request keeps (``kept_bytes``) the states of its recurrent layers, the keys and
values of its tokens (of a window, those that the next token reads), and rows that have not left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.stacks import PUBLISHED, WINDOWED, Stack, attention, random_stack, stack, state
from tests.core.test_packing import stacks, states_of
from vllm.config import CacheConfig
from vllm.v1.cache_kinds.attention import ChunkedLocalAttentionSpec, LocalAttentionSpec
from vllm.v1.cache_kinds.base import MAX_WASTE
from vllm.v1.cache_kinds.recurrent import MIN_FILLED
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import PoolLayout, plan_layout
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.kv_cache_interface import AttentionSpec, HiddenStateCacheSpec, KVCacheSpec, MambaSpec

MOST_TOKENS = 1 << 15
BF16 = torch.bfloat16


def rows(layers: int, hidden: int) -> HiddenStateCacheSpec:
    """Rows that leave after the step that computes them."""
    return HiddenStateCacheSpec(
        block_size=16, num_kv_heads=layers, head_size=hidden, dtype=BF16, max_resident_tokens=64
    )


def tokens_kept(spec: KVCacheSpec, num_tokens: int) -> int:
    if spec.holds_rows:
        return num_tokens % HASH_TOKENS
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_tokens % spec.reach
    if isinstance(spec, LocalAttentionSpec):
        return min(num_tokens, spec.reach - 1)
    return num_tokens


def kept_bytes(specs: Stack, num_tokens: int) -> int:
    total = 0
    for spec in specs.values():
        if isinstance(spec, MambaSpec):
            total += spec.real_page_size_bytes
        else:
            assert isinstance(spec, AttentionSpec | HiddenStateCacheSpec)
            total += spec.token_bytes * tokens_kept(spec, num_tokens)
    return total


def blocks_held(layout: PoolLayout, ends: Sequence[int]) -> list[int]:
    """Blocks of one request after each of its steps, which end after so many tokens."""
    config = layout.with_blocks(4 * MOST_TOKENS)
    pool = BlockPool(config.num_blocks)
    coordinator = KVCacheCoordinator(
        config, pool, max_retained_hidden_blocks=4, max_retained_snapshots=0
    )
    held = []
    for end in ends:
        coordinator.recurrent.extend("request")
        for manager in coordinator.token_managers:
            manager.extend("request", end)
            manager.release_unneeded("request", end)
        held.append(pool.num_blocks - 1 - pool.num_free_blocks)
    return held


def last_blocks(layout: PoolLayout) -> int:
    """Blocks that may be almost empty: one of the states, one of each table that only grows, and
    the first and the last of each that lets go of its beginning."""
    specs = [group.kv_cache_spec for group in layout.groups]
    cut = sum(isinstance(spec, LocalAttentionSpec) or spec.holds_rows for spec in specs)
    tables = sum(not spec.is_recurrent for spec in specs)
    return tables + cut + any(spec.is_recurrent for spec in specs)


def most_waste(specs: Stack) -> float:
    """Most that the blocks other than ``last_blocks`` take, in units of what is kept."""
    sizes = {spec.real_page_size_bytes for spec in states_of(specs).values()}
    if not sizes:
        windows = any(isinstance(spec, LocalAttentionSpec) for spec in specs.values())
        return 2.0 if windows else 1 + MAX_WASTE
    has_keys = any(isinstance(spec, AttentionSpec) for spec in specs.values())
    return 1 / MIN_FILLED if len(sizes) == 1 and has_keys else 1 + MAX_WASTE


def check_bound(specs: Stack, ends: Sequence[int]) -> None:
    layout = plan_layout(specs, CacheConfig())
    most, last = most_waste(specs), last_blocks(layout)
    for end, held in zip(ends, blocks_held(layout, ends), strict=True):
        full = (held - last) * layout.block_bytes
        assert full <= most * kept_bytes(specs, end) + 1, f"{held} blocks after {end} tokens"


steps = st.lists(st.integers(1, 700), min_size=1, max_size=30)


def ends_of(chunks: Sequence[int]) -> list[int]:
    return [sum(chunks[: i + 1]) for i in range(len(chunks))]


@settings(max_examples=300, deadline=None)
@given(specs=stacks(), chunks=steps)
def test_a_request_holds_little_more_than_it_keeps(specs: Stack, chunks: list[int]) -> None:
    specs = {n: rows(s.num_kv_heads, s.head_size) if s.holds_rows else s for n, s in specs.items()}
    check_bound(specs, ends_of(chunks))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), num_sizes=st.integers(1, 6), chunks=steps)
def test_stacks_of_real_sizes_keep_the_same_bound(
    seed: int, num_sizes: int, chunks: list[int]
) -> None:
    check_bound(random_stack(random.Random(seed), num_sizes), ends_of(chunks))


@pytest.mark.parametrize("name", PUBLISHED | WINDOWED)
def test_published_stacks_keep_the_same_bound(name: str) -> None:
    check_bound((PUBLISHED | WINDOWED)[name], [1, 15, 16, 17, 512, 4096, 4097, 32_768])


dense = st.builds(
    lambda n, heads: stack((n, attention(heads, 64))), st.integers(1, 40), st.integers(1, 8)
)
recurrent = st.builds(
    lambda n, channels, size: stack((n, state((3, 64 * channels), size, 64 * channels))),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 16]),
)


@settings(max_examples=300, deadline=None)
@given(
    specs=st.one_of(dense, recurrent, stacks()),
    layers=st.integers(1, 40),
    hidden=st.integers(1, 100),
)
def test_rows_fill_their_blocks_beside_anything(specs: Stack, layers: int, hidden: int) -> None:
    """Also where no attention layer has a say: beside states alone, one of which is no multiple."""
    own = rows(layers, 64 * hidden)
    layout = plan_layout({**specs, "hidden": own}, CacheConfig())
    a_token = layout.block_bytes / layout.groups[-1].kv_cache_spec.block_size
    assert a_token <= (1 + MAX_WASTE) * own.token_bytes


@pytest.mark.parametrize("block_size", [16, 64, 1024])
def test_one_block_for_all_kinds_is_less_than_any_layout_takes(block_size: int) -> None:
    """A block is one group's at a time, so that the first token of a request takes one of each."""
    both = stack((1, attention(2, 64)), (1, state((3, 128))))
    windows = stack((1, attention(2, 64)), (1, attention(2, 64, window=128)))
    for specs in (both, windows):
        layout = plan_layout(specs, CacheConfig(block_size=block_size))
        (held,) = blocks_held(layout, [1])
        assert held == 2
        assert held * layout.block_bytes > 1.02 * kept_bytes(specs, 1) + layout.block_bytes
