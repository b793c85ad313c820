"""States, windows and rows of any stack in one pool: what they take, and that none overlap."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.stacks import (
    PUBLISHED,
    Stack,
    attention,
    figures,
    latent,
    mamba2,
    random_figures,
    random_stack,
    stack,
    state,
)
from vllm.config import CacheConfig
from vllm.utils import cdiv
from vllm.v1.cache_kinds.base import MAX_WASTE
from vllm.v1.cache_kinds.recurrent import MIN_FILLED, pack_states
from vllm.v1.core.kv_cache_utils import describe, plan_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
)

BF16 = torch.bfloat16

sizes = st.integers(1, 40)
small_states = st.one_of(
    st.builds(lambda width, channels: state((width, channels)), st.integers(1, 3), sizes),
    st.builds(lambda channels, n: state((3, channels), n, channels), sizes, sizes),
    st.builds(lambda heads, dk, dv: state((), heads, dk, dv), st.integers(1, 4), sizes, sizes),
    st.builds(mamba2, st.integers(1, 4), sizes, sizes, st.integers(1, 2)),
)
attentions = st.one_of(
    st.builds(latent, sizes),
    st.builds(
        lambda heads, size, window: attention(heads, size, window=window),
        st.integers(1, 4),
        sizes,
        st.sampled_from([None, None, 5, 64]),
    ),
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Layers with keys, with a state of one of six sizes, with both or with neither; rows."""
    states = draw(st.lists(small_states, max_size=6))
    heads_first = draw(st.booleans())
    keys = [
        replace(spec, heads_first=heads_first)
        for spec in draw(st.lists(attentions, min_size=0 if states else 1, max_size=3))
    ]
    parts = {"attn": keys, "mixer": states}
    kinds = [{}, *({name: spec} for name, specs in parts.items() for spec in specs)]
    kinds += [{"attn": a, "mixer": s} for a in keys for s in states]
    layers = [kinds[1], *draw(st.lists(st.sampled_from(kinds), max_size=30))]
    specs = {f"layers.{i}.{n}": spec for i, own in enumerate(layers) for n, spec in own.items()}
    if draw(st.booleans()):
        specs["hidden"] = HiddenStateCacheSpec(
            block_size=16,
            num_kv_heads=draw(st.integers(1, 7)),
            head_size=draw(st.integers(1, 300)),
            dtype=draw(st.sampled_from([BF16, torch.float32])),
        )
    return specs


def states_of(specs: Stack) -> dict[str, MambaSpec]:
    return {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}


def content_bytes(spec: KVCacheSpec, tokens_per_block: int) -> int:
    if isinstance(spec, MambaSpec):
        tensors = zip(spec.shapes, spec.dtypes, strict=True)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)
    assert isinstance(spec, AttentionSpec)
    return tokens_per_block * spec.token_bytes


@settings(max_examples=300, deadline=None)
@given(specs=stacks())
def test_layers_have_all_their_bytes_and_share_none(specs: Stack) -> None:
    plan = plan_layout(specs, CacheConfig()).with_blocks(2)
    assert sorted(n for g in plan.kv_cache_groups for n in g.layer_names) == sorted(specs)
    pool = torch.zeros(plan.num_blocks, plan.block_bytes, dtype=torch.int8)
    references = plan.references(pool).group_data_refs
    for group, own in zip(plan.kv_cache_groups, references, strict=True):
        owner = bytearray(plan.block_bytes)
        listed = dict.fromkeys(group.layer_names, 0)
        for reference in own:
            listed[reference.layer] += reference.page_size_bytes
            for start, length in reference.runs:
                assert not any(owner[start : start + length])
                owner[start : start + length] = b"\1" * length
        tokens = group.kv_cache_spec.block_size
        assert len(owner) == plan.block_bytes
        assert listed == {name: content_bytes(specs[name], tokens) for name in listed}


@settings(max_examples=60, deadline=None)
@given(specs=stacks())
def test_a_block_copied_by_its_references_is_the_same_to_every_layer(specs: Stack) -> None:
    """Connectors move what layers see, and layers of one block do not disturb each other's data."""
    plan = plan_layout(specs, CacheConfig()).with_blocks(3)
    pool = torch.full((3, plan.block_bytes), -1, dtype=torch.int8)
    views = plan.layer_views(pool)
    references = plan.references(pool).group_data_refs
    for group, own in zip(plan.kv_cache_groups, references, strict=True):
        tensors = [v for name in group.layer_names for v in tensors_of(views[name])]
        for value, view in enumerate(tensors, 1):
            view[1] = value
        pool[2] = -1
        for reference in own:
            for start, length in reference.runs:
                pool[2, start : start + length] = pool[1, start : start + length]
        for value, view in enumerate(tensors, 1):
            assert bool((view[1:] == value).all())


def tensors_of(view: Any) -> tuple[torch.Tensor, ...]:
    return view if isinstance(view, tuple) else (view,)


@settings(max_examples=300, deadline=None)
@given(specs=stacks(), num_tokens=st.integers(64, 4096))
def test_a_request_takes_little_more_than_its_contents(specs: Stack, num_tokens: int) -> None:
    """1.02 x what it keeps, and a block of each kind; 4/3 where all states are alike.

    That is, where a stack has states: windows beside other attention alone lie as they come.
    """
    sizes = {spec.real_page_size_bytes for spec in states_of(specs).values()}
    if not sizes:
        return
    has_keys = any(isinstance(spec, AttentionSpec) for spec in specs.values())
    most = 1 / MIN_FILLED if len(sizes) == 1 and has_keys else 1 + MAX_WASTE
    assert figures(specs, num_tokens).full_blocks <= most + 1e-3


def test_random_stacks_of_real_sizes_keep_the_same_bound() -> None:
    found = random_figures(300, 4096)
    assert max(own.full_blocks for own in found[::6]) <= 1 / MIN_FILLED
    several = [own for i, own in enumerate(found) if i % 6]
    assert max(own.full_blocks for own in several) <= 1 + MAX_WASTE
    assert statistics.mean(own.states for own in several) <= 1.12
    assert statistics.mean(own.request for own in several) <= 1.08


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), columns=st.integers(1, 8), hidden=st.integers(4, 128))
def test_rows_fill_the_blocks_of_states_of_several_sizes(
    seed: int, columns: int, hidden: int
) -> None:
    draw = random.Random(seed)
    rows = HiddenStateCacheSpec(
        block_size=16, num_kv_heads=columns, head_size=64 * hidden, dtype=BF16
    )
    specs = random_stack(draw, draw.randint(2, 6)) | {"hidden": rows}
    layout = plan_layout(specs, CacheConfig())
    assert figures(specs, 4096, layout).full_blocks <= 1 + MAX_WASTE
    assert layout.groups[-1].kv_cache_spec.block_size * rows.token_bytes >= (
        layout.block_bytes / (1 + MAX_WASTE)
    )


@settings(max_examples=50, deadline=None)
@given(specs=stacks(), seed=st.integers(0, 10**6))
def test_the_order_of_layers_changes_no_size(specs: Stack, seed: int) -> None:
    names = list(specs)
    random.Random(seed).shuffle(names)
    plan, other = (
        plan_layout(own, CacheConfig()) for own in (specs, {name: specs[name] for name in names})
    )
    assert plan.block_bytes == other.block_bytes
    assert len(plan.groups) == len(other.groups)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_stacks(name: str) -> None:
    """Their states are alike; a block holds one of them and little more, or several."""
    found = figures(PUBLISHED[name], 4096)
    assert found.request <= 1.07
    assert found.full_blocks <= 1.06


def test_a_block_that_is_raised_is_raised_until_states_fill_it() -> None:
    """The smallest is one of Jamba's states and a quarter; three times as much holds four."""
    layout = plan_layout(PUBLISHED["Jamba-v0.1"], CacheConfig())
    assert layout.block_bytes == 9 * 2**18
    assert figures(PUBLISHED["Jamba-v0.1"], 4096, layout).states <= 1.03


def test_a_small_state_lies_beside_a_large_one() -> None:
    """Alone, the small state would take a whole block, as large as the largest state."""
    specs = stack((4, attention(8, 128)), (24, mamba2(128, 64, 128, 8)), (24, state((2, 4096))))
    alone = stack((4, attention(8, 128)), (24, mamba2(128, 64, 128, 8)))
    mixed, without = plan_layout(specs, CacheConfig()), plan_layout(alone, CacheConfig())
    assert mixed.block_bytes == without.block_bytes
    assert len(mixed.groups) == len(without.groups)


@pytest.mark.parametrize("asked", [{"block_size": 64}, {"attn_pack_size": 2}])
def test_blocks_that_were_asked_for_are_not_grown(asked: dict[str, int]) -> None:
    specs = stack((4, attention(8, 128)), (9, state((), 40, 100, 10)), (5, state((), 21, 100, 10)))
    page = 4 * 16 * 4096
    assert plan_layout(specs, CacheConfig()).block_bytes > page
    layout = plan_layout(specs, CacheConfig(**asked))
    assert layout.block_bytes == (4 * page if "block_size" in asked else 2 * page)
    assert sum(len(g.layer_names) for g in layout.groups[1:]) == 14


@given(states=st.lists(st.integers(1, 5000), min_size=1, max_size=30), spare=st.integers(0, 9000))
def test_every_state_is_in_one_block_that_holds_it(states: list[int], spare: int) -> None:
    room = max(states) + spare
    blocks = pack_states(states, room)
    assert sorted(index for block in blocks for index in block) == list(range(len(states)))
    taken = [sum(cdiv(states[i], 64) * 64 for i in block) for block in blocks]
    for block, first in zip(blocks, taken, strict=True):
        assert first - cdiv(states[block[-1]], 64) * 64 + states[block[-1]] <= room
    # No two of them could be one.
    assert all(a + b > room for a, b in itertools.combinations(taken, 2))
    if len(set(states)) == 1:
        each = 1 + (room - states[0]) // (cdiv(states[0], 64) * 64)
        assert len(blocks) == cdiv(len(states), each)


def test_the_log_says_what_states_take() -> None:
    specs = stack((6, attention(8, 64)), (10, state((2, 2048))), (5, mamba2(24, 64, 128, 1)))
    lines = describe(plan_layout(specs, CacheConfig()).with_blocks(100))
    used = 10 * 8192 + 5 * specs["layers.20"].real_page_size_bytes
    (line,) = [line for line in lines if "recurrent" in line]
    assert f"15 layers, {used:,} bytes per request in 5 blocks, 11.7 % of them unused" in line
