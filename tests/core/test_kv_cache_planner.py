"""The plan of the pool, in exact bytes, on the published shapes of Qwen3.5 and odd ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config import CacheConfig
from vllm.utils.token_spread import TokenSpread
from vllm.v1.cache_kinds.base import RetentionLimits
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    blocks_per_request,
    describe,
    estimate_max_model_len,
    get_kv_cache_configs,
    get_kv_cache_groups,
    plan_layout,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheReferences,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cdiv,
)

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """A published Qwen3.5 text config, as far as the pool depends on it."""

    layers: int
    hidden: int
    kv_heads: int
    value_heads: int
    attention_block: int  # tokens, with the smallest block that holds one state
    block_kib: int
    gdn_mib: float

    @property
    def full_layers(self) -> int:
        return self.layers // 4


SHAPES = {
    "0.8B": Shape(24, 1024, 2, 16, 96, 1152, 20.2),
    "9B": Shape(32, 4096, 4, 32, 80, 2560, 60.0),
    "27B": Shape(64, 5120, 4, 48, 64, 4096, 192.0),
    "35B-A3B": Shape(40, 2048, 2, 32, 112, 2240, 65.6),
    "397B-A17B": Shape(60, 4096, 2, 64, 144, 4320, 189.8),
}


def qwen_specs(shape: Shape, num_hidden_layers: int, tp: int) -> dict[str, KVCacheSpec]:
    channels = (2 * 16 * 128 + shape.value_heads * 128) // tp
    state = MambaSpec(
        block_size=64,
        shapes=((3, channels), (shape.value_heads // tp, 128, 128)),
        dtypes=(BF16, torch.float32),
    )
    attention = FullAttentionSpec(
        block_size=16, num_kv_heads=shape.kv_heads // tp, head_size=256, dtype=BF16
    )
    specs: dict[str, KVCacheSpec] = {
        f"layers.{i}": attention if i % 4 == 3 else state for i in range(shape.layers)
    }
    specs["hidden"] = HiddenStateCacheSpec(
        block_size=16, num_kv_heads=num_hidden_layers, head_size=shape.hidden // tp, dtype=BF16
    )
    return specs


def config_for(max_model_len: int, **cache: Any) -> Any:
    return SimpleNamespace(
        cache_config=CacheConfig(**cache),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_tokens_under_way=2048),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )


def plan_of(config: Any, specs: Any, available_bytes: int) -> KVCacheConfig:
    (plan,) = get_kv_cache_configs(config, [specs], [available_bytes])
    return plan


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_model_len", [4096, 2049, 5000])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("num_hidden_layers", [4, 6])
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(
    name: str, num_hidden_layers: int, tp: int, max_model_len: int, prefix_caching: bool
) -> None:
    shape = SHAPES[name]
    specs = qwen_specs(shape, num_hidden_layers, tp)
    config = config_for(max_model_len, enable_prefix_caching=prefix_caching)
    layout = plan_layout(specs, config.cache_config)

    assert layout.block_bytes == shape.block_kib * 1024 // tp
    attention, *recurrent, hidden = layout.groups
    assert attention.kv_cache_spec.block_size == shape.attention_block
    assert len(attention.layer_names) == shape.full_layers
    # One state a block, so the recurrent state costs whole blocks.
    assert len(recurrent) == shape.layers - shape.full_layers
    assert len(recurrent) * layout.block_bytes * tp / 2**20 == pytest.approx(
        shape.gdn_mib, rel=0.01
    )
    row_bytes = num_hidden_layers * shape.hidden * 2
    assert isinstance(hidden.kv_cache_spec, HiddenStateCacheSpec)
    cost_over_all_ranks = layout.block_bytes / hidden.kv_cache_spec.block_size * tp
    assert cost_over_all_ranks <= 1.02 * row_bytes

    # Everything that a request of 4,096 tokens holds, against the bytes of its contents.
    whole = config_for(4096)
    blocks = blocks_per_request(whole, layout.groups)
    kv_token = shape.full_layers * shape.kv_heads * 2 * 256 * 2
    state = sum(s.real_page_size_bytes for s in specs.values() if isinstance(s, MambaSpec))
    ideal = 4096 * (kv_token + row_bytes) / tp + state
    assert blocks * layout.block_bytes <= 1.10 * ideal


def test_pool_of_a_27b_model_needs_no_200_gib() -> None:
    """A user's 27B run, 5 layers and 262,144 tokens, was charged 200 GiB of hidden states."""
    specs = qwen_specs(SHAPES["27B"], 5, 1)
    layout = plan_layout(specs, CacheConfig())
    hidden = layout.groups[-1].kv_cache_spec
    ideal = 262_144 * 5 * 5120 * 2
    assert cdiv(262_144, hidden.block_size) * layout.block_bytes <= 1.02 * ideal


@pytest.mark.parametrize("pack", [1, 2, 3, 4, 6])
def test_attn_pack_size_is_upstreams_block_size(pack: int) -> None:
    """Upstream: tokens = 16 * ceil(state / (16 * N * bytes of a token and layer))."""
    specs = qwen_specs(SHAPES["0.8B"], 4, 1)
    layout = plan_layout(specs, CacheConfig(attn_pack_size=pack))
    state = 1_085_440
    assert layout.groups[0].kv_cache_spec.block_size == 16 * cdiv(state, 16 * pack * 2048)
    states_in_a_block = max(len(g.layer_names) for g in layout.groups[1:-1])
    assert states_in_a_block == min(18, layout.block_bytes // state)


@pytest.mark.parametrize("pack", [0, 7, 100])
def test_attn_pack_size_out_of_range(pack: int) -> None:
    specs = qwen_specs(SHAPES["0.8B"], 4, 1)
    with pytest.raises(ValueError, match=rf"attn_pack_size.*{pack}"):
        plan_layout(specs, CacheConfig(attn_pack_size=pack))


def test_attn_pack_size_needs_a_hybrid_model() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16)
    with pytest.raises(ValueError, match=r"attn_pack_size=2 .* recurrent"):
        plan_layout({"a": spec}, CacheConfig(attn_pack_size=2))


def test_hidden_spec_bytes() -> None:
    spec = HiddenStateCacheSpec(block_size=53, num_kv_heads=6, head_size=4096, dtype=BF16)
    assert spec.real_page_size_bytes == spec.page_size_bytes == 53 * 6 * 4096 * 2
    padded = HiddenStateCacheSpec(
        block_size=53, num_kv_heads=6, head_size=4096, dtype=BF16, page_size_padded=2_621_440
    )
    assert padded.page_size_bytes == 2_621_440
    assert padded.max_memory_usage_bytes(config_for(5000)) == cdiv(5000, 53) * 2_621_440
    config = config_for(5000)
    config.parallel_config.decode_context_parallel_size = 2
    config.parallel_config.prefill_context_parallel_size = 3
    assert padded.max_memory_usage_bytes(config) == cdiv(cdiv(5000, 6), 53) * 2_621_440
    with pytest.raises(ValueError, match="page_size_padded"):
        _ = HiddenStateCacheSpec(
            block_size=1, num_kv_heads=1, head_size=8, dtype=BF16, page_size_padded=15
        ).page_size_bytes


def spread_spec(spread: TokenSpread, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=BF16, spread=spread, **more
    )


@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_ranks_that_share_tokens_need_blocks_for_their_part(decode: int, prefill: int) -> None:
    config = config_for(5000)
    config.parallel_config.decode_context_parallel_size = decode
    config.parallel_config.prefill_context_parallel_size = prefill
    ranks = decode * prefill
    spec, hidden = (
        spread_spec(TokenSpread(ranks)),
        HiddenStateCacheSpec(block_size=10, num_kv_heads=2, head_size=64, dtype=BF16),
    )
    assert spec.tokens_per_block == 16 * ranks
    assert spec.num_blocks(16 * ranks) == 1
    assert spec.num_blocks(16 * ranks + 1) == 2
    assert spec.max_blocks_per_request(config) == cdiv(5000, 16 * ranks)
    assert spec.max_memory_usage_bytes(config) == cdiv(cdiv(5000, ranks), 16) * 16 * 2 * 64 * 2
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=BF16)
    assert latent.max_memory_usage_bytes(config) == cdiv(cdiv(5000, ranks), 16) * 16 * 72 * 2
    # One rank has all rows, so the pool is planned for all of them.
    assert hidden.max_blocks_per_request(config) == 500


def test_a_block_has_the_tokens_of_all_ranks() -> None:
    """Layers that keep some tokens, and rows, are on every rank as they are without."""
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=BF16, sliding_window=33
    )
    rows = HiddenStateCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16)
    config = config_for(2000)
    plans = {}
    for ranks in (1, 4):
        specs = {"a": spread_spec(TokenSpread(ranks, 8)), "b": window, "rows": rows}
        plans[ranks] = plan_of(config, specs, 2**22)
    assert plans[1].block_bytes == plans[4].block_bytes
    whole, spread = (
        {group.layer_names[0]: group.kv_cache_spec for group in plan.kv_cache_groups}
        for plan in plans.values()
    )
    assert spread["a"].block_size == whole["a"].block_size
    assert spread["a"].tokens_per_block == 4 * whole["a"].tokens_per_block
    assert (spread["b"], spread["rows"]) == (whole["b"], whole["rows"])
    for name in ("a", "b", "rows"):
        assert plans[1].page_runs(name) == plans[4].page_runs(name)
    manager = spread["a"].make_manager(BlockPool(9), 0, RetentionLimits(0))
    assert manager.tokens_per_block == spread["a"].tokens_per_block


def test_the_longest_request_grows_with_the_ranks_that_share_it() -> None:
    for ranks in (1, 2, 4):
        layout = plan_layout({"a": spread_spec(TokenSpread(ranks))}, CacheConfig())
        fitting = estimate_max_model_len(config_for(10**6), layout, 64 * layout.block_bytes)
        assert fitting == 63 * 16 * ranks


def test_runs_of_tokens_have_to_fill_a_block() -> None:
    with pytest.raises(ValueError, match=r"cp_kv_cache_interleave_size=5 does not .* 1, 2, 4, 8 o"):
        plan_layout({"a": spread_spec(TokenSpread(2, 5))}, CacheConfig())
    with pytest.raises(ValueError, match=r"cp_kv_cache_interleave_size=64 does not .* 16 tokens"):
        plan_layout({"a": spread_spec(TokenSpread(2, 64))}, CacheConfig())
    layout = plan_layout({"a": spread_spec(TokenSpread(2, 64))}, CacheConfig(block_size=128))
    assert layout.groups[0].kv_cache_spec.tokens_per_block == 256


def test_rows_do_not_share_the_table_of_spread_tokens() -> None:
    rows = HiddenStateCacheSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=BF16, shares_table=True
    )
    with pytest.raises(ValueError, match=r"disable_hybrid.*parallel_size or prefill"):
        plan_layout({"a": spread_spec(TokenSpread(2)), "rows": rows}, CacheConfig())


def test_hidden_rows_that_leave_at_once_are_charged_a_step() -> None:
    spec = HiddenStateCacheSpec(
        block_size=10, num_kv_heads=1, head_size=8, dtype=BF16, max_resident_tokens=64
    )
    assert spec.max_blocks_per_request(config_for(100_000)) == 8
    assert spec.max_blocks_per_request(config_for(30)) == 3


@pytest.mark.parametrize("kind", ["dense", "sliding", "mixed", "hybrid"])
def test_hidden_layer_never_changes_how_others_are_grouped(kind: str) -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16)
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=BF16, sliding_window=33
    )
    state = MambaSpec(block_size=64, shapes=((3, 64), (2, 8, 8)), dtypes=(BF16, torch.float32))
    pattern: dict[str, list[KVCacheSpec]] = {
        "dense": [full] * 5,
        "sliding": [window] * 5,
        "mixed": [window, full, window, window, full],
        "hybrid": [state, state, full, state, window],
    }
    specs = {f"layers.{i}": spec for i, spec in enumerate(pattern[kind])}
    config = config_for(1000)
    without = get_kv_cache_groups(config, specs)
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=100, dtype=BF16)
    with_hidden = get_kv_cache_groups(config, {"hidden": hidden, **specs})
    assert [g.layer_names for g in with_hidden[:-1]] == [g.layer_names for g in without]
    last = with_hidden[-1]
    assert last.layer_names == ["hidden"]
    assert isinstance(last.kv_cache_spec, HiddenStateCacheSpec)
    padded = last.kv_cache_spec.page_size_padded
    assert padded == plan_layout({"hidden": hidden, **specs}, config.cache_config).block_bytes


def test_one_budget_in_exact_bytes() -> None:
    """Hidden-state bytes count in the blocks, the memory check, and the length estimate."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16)
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=BF16)
    specs = {"a": full, "b": full, "h": hidden}
    config = config_for(100)
    layout = plan_layout(specs, config.cache_config)
    assert layout.block_bytes == 4096  # 16 tokens x 2 layers x 128 bytes; 16 rows of 256 bytes
    needed = 1 + 7 + 7  # null block, 100 tokens in blocks of 16, 100 rows in blocks of 16
    plan = plan_of(config, specs, needed * 4096)
    assert plan.num_blocks == needed
    assert plan.size_bytes == needed * 4096
    with pytest.raises(ValueError, match=r"needs 15 blocks .* max_model_len=96 would fit"):
        plan_of(config, specs, needed * 4096 - 1)
    assert estimate_max_model_len(config, layout, needed * 4096) == 100
    assert estimate_max_model_len(config, layout, 13 * 4096) == 96
    assert estimate_max_model_len(config, layout, 4096) == 0
    text = "\n".join(describe(plan))
    assert "at most 224 tokens" in text
    assert "256 bytes per token" in text


def test_ranks_get_the_blocks_of_the_tightest() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16)
    config = config_for(32)
    plans = get_kv_cache_configs(config, [{"a": full}, {"a": full}], [2**20, 2**19])
    assert {p.num_blocks for p in plans} == {2**19 // 2048}
    assert all(t.size == p.size_bytes for p in plans for t in p.kv_cache_tensors)


def test_block_size_that_cannot_hold_a_row_is_refused() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16)
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=4, head_size=512, dtype=BF16)
    with pytest.raises(ValueError, match=r"block_size=16 .* at least 128"):
        plan_layout({"a": full, "h": hidden}, CacheConfig(block_size=16))
    assert plan_layout({"a": full, "h": hidden}, CacheConfig(block_size=128)).block_bytes == 4096


def references_of(plan: KVCacheConfig) -> KVCacheReferences:
    return plan.references(torch.zeros(plan.num_blocks, plan.block_bytes, dtype=torch.int8))


def test_references_list_every_byte_of_a_layer() -> None:
    plan = plan_of(config_for(4096), qwen_specs(SHAPES["0.8B"], 4, 1), 2**28)
    references = references_of(plan)
    (allocation,) = references.tensors
    assert allocation.tensor.shape == (plan.num_blocks, allocation.page_size_bytes)
    attention = {r.layer: r for r in references.group_data_refs[0]}["layers.3"]
    assert (attention.head_stride, attention.value_offset) == (2 * 256 * 2, 256 * 2)
    assert attention.page_size_bytes == 96 * 2048
    states = references.group_data_refs[1]  # one by one
    assert [r.page_size_bytes for r in states] == [36_864, 1_048_576]
    assert {r.layer for r in states} == set(plan.kv_cache_groups[1].layer_names)
    (hidden,) = references.group_data_refs[-1]
    assert (hidden.layer, hidden.runs) == ("hidden", ((0, 144 * 8192),))


def test_references_of_mixed_heads_and_of_latent_layers() -> None:
    def attention(heads: int, size: int, values: int | None = None) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=16, num_kv_heads=heads, head_size=size, head_size_v=values, dtype=BF16
        )

    specs = {"a": attention(2, 32), "b": attention(1, 64), "c": attention(2, 48, 16)}
    plan = plan_of(config_for(256), {**specs, "latent": attention(1, 96, 0)}, 2**22)
    found = {r.layer: r for r in references_of(plan).group_data_refs[0]}
    assert {n: (r.head_stride, r.value_offset) for n, r in found.items()} == {
        "a": (128, 64),
        "b": (256, 128),
        "c": (128, 96),
        "latent": (192, None),
    }


def test_a_slice_of_the_heads_is_one_run_of_a_block() -> None:
    """Heads first: over all layers that have as many heads, and all tokens."""
    layer = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=24, dtype=BF16, heads_first=True
    )
    wider = replace(layer, num_kv_heads=2, head_size=48)
    specs = {"a": layer, "b": wider, "c": layer}
    plan = plan_of(config_for(256, block_size=48), specs, 2**22)
    assert [t.layers for t in plan.kv_cache_tensors] == [("a", "c"), ("b",)]
    for tensor in plan.kv_cache_tensors:
        heads = specs[tensor.layers[0]].num_kv_heads
        runs = [plan.page_runs(name) for name in tensor.layers]
        pages = tensor.pages_per_block
        for head in range(heads):
            own = sorted(run for layer in runs for run in layer[head * pages : (head + 1) * pages])
            starts = [start for start, _ in own]
            ends = [start + length for start, length in own]
            assert starts[0] == tensor.offset + head * tensor.head_stride
            assert starts[1:] == ends[:-1]
            assert ends[-1] == starts[0] + tensor.head_stride
    found = {r.layer: r.head_stride for r in references_of(plan).group_data_refs[0]}
    assert found == {"a": 2 * 48 * 96, "b": 48 * 192, "c": 2 * 48 * 96}


head_sizes = st.integers(1, 40)
attention_layers = st.builds(
    lambda heads, head, window, heads_first: (
        FullAttentionSpec(
            block_size=16,
            num_kv_heads=heads,
            head_size=head,
            dtype=BF16,
            heads_first=heads_first,
        )
        if window is None
        else SlidingWindowSpec(
            block_size=16,
            num_kv_heads=heads,
            head_size=head,
            dtype=BF16,
            sliding_window=window,
            heads_first=heads_first,
        )
    ),
    st.integers(1, 4),
    head_sizes,
    st.sampled_from([None, None, 5, 64]),
    st.booleans(),
)
state_layers = st.builds(
    lambda channels, heads, dk, dv: MambaSpec(
        block_size=64, shapes=((3, channels), (heads, dk, dv)), dtypes=(BF16, torch.float32)
    ),
    st.integers(1, 50),
    st.integers(1, 4),
    head_sizes,
    head_sizes,
)


@settings(max_examples=300, deadline=None)
@given(
    layers=st.lists(st.one_of(attention_layers, state_layers), min_size=1, max_size=12),
    hidden=st.none() | st.tuples(st.integers(1, 7), st.integers(1, 300)),
)
def test_every_byte_has_one_owner(
    layers: list[KVCacheSpec], hidden: tuple[int, int] | None
) -> None:
    specs: dict[str, KVCacheSpec] = {f"layers.{i}": spec for i, spec in enumerate(layers)}
    if hidden is not None:
        specs["hidden"] = HiddenStateCacheSpec(
            block_size=16, num_kv_heads=hidden[0], head_size=hidden[1], dtype=torch.float32
        )
    plan = plan_of(config_for(100), specs, 2**31)
    assert sorted(n for g in plan.kv_cache_groups for n in g.layer_names) == sorted(specs)
    for group in plan.kv_cache_groups:
        owner = bytearray(plan.block_bytes)
        for name in group.layer_names:
            spec = specs[name]
            runs = plan.page_runs(name)
            for start, length in runs:
                assert not any(owner[start : start + length])
                owner[start : start + length] = b"\1" * length
            if isinstance(spec, AttentionSpec):
                assert sum(n for _, n in runs) == group.kv_cache_spec.block_size * spec.token_bytes
