"""The results of an earlier prompt are found again, and change no bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.platforms.cpu import CpuPlatform

Checkpoint = Callable[..., Path]
FAMILIES = ("llama", "qwen2", "qwen3_5")
LAYERS = [1, 2, 4, 0]
LONG = {"max_position_embeddings": 2048}
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(51, [1300])]
GRAIN = 16
"""Hits end at multiples of this."""

linear, full = "linear_attention", "full_attention"
STRIPED: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": [linear, full] * 4,
    "linear_value_head_dim": 32,  # a state fills nearly the block of 16 tokens
    **LONG,
}


def ask(llm: LLM, tokens: Sequence[int], params: SamplingParams | None = None) -> RequestOutput:
    (output,) = llm.generate([list(tokens)], params or greedy(2), use_tqdm=False)
    return output


def cached_tokens(output: RequestOutput) -> int:
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


def fresh_rows(folder: Path, path: Path, tokens: Sequence[int]) -> torch.Tensor:
    """The rows of a prompt in an engine that has no cache."""
    config = extraction_config(LAYERS, path)
    with engine(folder, max_model_len=2048, enable_prefix_caching=False, **config) as llm:
        output = ask(llm, tokens)
        assert cached_tokens(output) == 0
        again = ask(llm, tokens)
        assert cached_tokens(again) == 0
        return rows_of(again)


def computed_tokens(llm: LLM) -> list[int]:
    """Tokens of every step from now on."""
    scheduler = core_of(llm).scheduler
    schedule, counts = scheduler.schedule, []

    def counting() -> Any:
        scheduled = schedule()
        counts.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    scheduler.schedule = counting
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_prompt_computes_only_the_rest(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **LONG)
    second = TEXT[:1000] + [7] * 150
    expected = fresh_rows(folder, tmp_path / "fresh", second)
    with engine(folder, max_model_len=2048, **extraction_config(LAYERS, tmp_path)) as llm:
        assert cached_tokens(ask(llm, TEXT)) == 0
        counts = computed_tokens(llm)
        output = ask(llm, second, greedy(1))
        assert cached_tokens(output) >= 1000 - 64
        assert sum(counts) == len(second) - cached_tokens(output)
        assert torch.equal(rows_of(output), expected)
        # A repetition: all but the last grain, which has the last token in it.
        again = ask(llm, second)
        assert cached_tokens(again) == (len(second) - 1) // GRAIN * GRAIN
        assert torch.equal(rows_of(again), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_a_conversation(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prompt, output and the next question are found in the turn after."""
    folder = checkpoint(family, **LONG)
    tokens, num_known = TEXT[:90], 0
    with engine(folder, **extraction_config(LAYERS, tmp_path)) as llm:
        for turn in range(4):
            output = ask(llm, tokens, with_output_tokens(20))
            rows = rows_of(output)
            assert cached_tokens(output) >= num_known // GRAIN * GRAIN
            # The last output token did not go through the model; states are kept in the prompt.
            num_known = len(tokens) - 1 if family == "qwen3_5" else len(tokens) + 19
            tokens = tokens + list(output.outputs[0].token_ids) + TEXT[turn * 31 : turn * 31 + 31]
    expected = fresh_rows(folder, tmp_path / "fresh", tokens)
    assert torch.equal(rows, expected[: len(rows)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [2048, 301])
def test_rows_beyond_what_is_kept_leave_the_beginning(
    family: str, budget: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A long prompt is found as far as hidden_state_cache_bytes reaches."""
    folder = checkpoint(family, **LONG)
    expected = fresh_rows(folder, tmp_path / "fresh", TEXT)
    options = {
        "max_model_len": 2048,
        "max_num_batched_tokens": budget,
        "hidden_state_cache_bytes": 600 * len(LAYERS) * 72 * 4,
    }
    with engine(folder, **options, **extraction_config(LAYERS, tmp_path)) as llm:
        ask(llm, TEXT)
        output = ask(llm, TEXT)
    assert 600 - 2 * 64 <= cached_tokens(output) <= 600
    assert torch.equal(rows_of(output), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extracts", [True, False])
def test_a_full_pool_still_learns_shared_prefixes(
    family: str, extracts: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **LONG)
    config = extraction_config([1], tmp_path) if extracts else {}
    config |= {"max_model_len": 2048, "max_num_batched_tokens": 2048}
    with engine(folder, kv_cache_memory_bytes=6 * 2**20, **config) as llm:
        llm.generate(random_prompts(52, [900] * 16), greedy(), use_tqdm=False)
        pool = core_of(llm).scheduler.kv_cache_manager.pool
        assert pool.num_idle_blocks < 16
        found = [cached_tokens(ask(llm, TEXT[:1000] + [i] * 90)) for i in range(3)]
    assert found[0] == 0
    assert found[1] >= 1000 - 8 * GRAIN
    # Where two went apart, the third finds everything.
    assert found[2] == 1000 // GRAIN * GRAIN


def test_reset_salt_and_switch(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5")
    prompt: Any = {"prompt_token_ids": TEXT[:200]}

    def cached(llm: LLM, **extra: Any) -> int:
        salted: Any = {**prompt, **extra}
        (output,) = llm.generate([salted], greedy(1), use_tqdm=False)
        return cached_tokens(output)

    with engine(folder) as llm:
        assert [cached(llm), cached(llm)] == [0, 192]
        assert [cached(llm, cache_salt="x"), cached(llm, cache_salt="x")] == [0, 192]
        assert cached(llm, cache_salt="y") == 0
        llm.reset_prefix_cache()
        assert [cached(llm), cached(llm)] == [0, 192]
        stats = core_of(llm).stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (7 * 200, 3 * 192)
    with engine(folder, enable_prefix_caching=False) as llm:
        assert [cached(llm), cached(llm)] == [0, 0]


@pytest.mark.parametrize("interval", [16, 96, 256])
def test_mamba_block_size_is_the_distance_of_states(
    interval: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_5", **LONG)
    expected = fresh_rows(folder, tmp_path / "fresh", TEXT[:300])
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, mamba_block_size=interval, **config) as llm:
        ask(llm, TEXT[:290] + [3] * 40)
        output = ask(llm, TEXT[:300])
        # The thinning for long prompts begins at 16 intervals.
        assert cached_tokens(output) == (288 if interval < 96 else 290 // interval * interval)
        assert torch.equal(rows_of(output), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_another_depth_are_not_mixed(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """max_tokens=0 computes no layer above the deepest one asked for: nobody else may use it."""
    folder = checkpoint(family)
    tokens = TEXT[:200]
    with engine(folder, **extraction_config([1, 2], tmp_path)) as llm:
        expected = ask(llm, tokens, with_output_tokens(6))
        llm.reset_prefix_cache()
        shallow = ask(llm, tokens, greedy(0))
        again = ask(llm, tokens, greedy(0))
        assert [cached_tokens(shallow), cached_tokens(again)] == [0, 192]
        deep = ask(llm, tokens, with_output_tokens(6))
        assert cached_tokens(deep) == 0
        deep_again = ask(llm, tokens, with_output_tokens(6))
        assert cached_tokens(deep_again) == 192
        shallow_again = ask(llm, tokens, greedy(0))
        assert cached_tokens(shallow_again) == 192
    for output in (shallow, again, deep, deep_again, shallow_again):
        rows = rows_of(output)
        assert torch.equal(rows, rows_of(expected)[: len(rows)])
    for output in (deep, deep_again):
        assert list(output.outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def workload(kind: str) -> list[list[int]]:
    rng = random.Random(53)

    def text(length: int) -> list[int]:
        return [rng.randrange(300) for _ in range(length)]

    if kind == "repeated":
        return [text(rng.randint(40, 350)) for _ in range(8)] * 3
    beginnings = [text(length) for length in (300, 221, 150)]
    return [rng.choice(beginnings) + text(rng.randint(5, 80)) for _ in range(40)]


def hit_rate(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    for tokens in prompts:
        ask(llm, tokens, greedy(1))
    stats = core_of(llm).stats()
    return stats.prefix_cache_hits / stats.prefix_cache_queries


@pytest.mark.parametrize("kind", ["repeated", "shared"])
def test_attn_pack_size_changes_no_bit(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every N: the same rows, the same hits, in a pool that has room."""
    folder = checkpoint("qwen3_5", **STRIPED)
    seen = []
    for pack in (1, 2, 3, 4):
        config = extraction_config([1, 8], tmp_path / str(pack))
        with engine(folder, attn_pack_size=pack, **config) as llm:
            outputs = [ask(llm, tokens) for tokens in workload(kind)]
            size = core_of(llm).vllm_config.cache_config.block_size
        hits = [cached_tokens(output) for output in outputs]
        seen.append((size, hits, [rows_of(output) for output in outputs]))
    sizes = [size for size, _, _ in seen]
    assert sizes == [64, 32, 32, 16]
    _, hits, rows = seen[0]
    assert sum(hits) > 0.5 * sum(len(tokens) for tokens in workload(kind))
    for _, other_hits, other_rows in seen[1:]:
        assert other_hits == hits
        assert all(torch.equal(a, b) for a, b in zip(rows, other_rows, strict=True))


@pytest.mark.parametrize("kind", ["repeated", "shared"])
def test_attn_pack_size_costs_no_hits_under_pressure(kind: str, checkpoint: Checkpoint) -> None:
    """Pools of the same bytes, from far too small to large enough."""
    folder = checkpoint("qwen3_5", **STRIPED)
    prompts = workload(kind)
    rates: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for pack in rates:
        for kibibytes in (1536, 2048, 2560, 3072):
            options = {"attn_pack_size": pack, "kv_cache_memory_bytes": kibibytes * 1024}
            with engine(folder, **options) as llm:
                rates[pack].append(hit_rate(llm, prompts))
    assert rates[1][0] < rates[1][-1] - 0.1, "no pressure"
    for pack in (2, 4):
        assert sum(rates[pack]) >= sum(rates[1])


def test_states_are_kept_at_the_multiples_of_a_devices_chunks(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose recurrent kernels work in chunks: prompts are cut there, hits end there."""
    monkeypatch.setattr(CpuPlatform, "recurrent_chunk_tokens", 64)
    prompt = random_prompts(50, [200])[0]["prompt_token_ids"]
    with engine(checkpoint("qwen3_5"), max_num_batched_tokens=100) as llm:
        scheduler = core_of(llm).scheduler
        ends: set[int] = set()
        schedule = scheduler.schedule

        def watched() -> Any:
            scheduled = schedule()
            running = [scheduler.requests[i] for i in scheduled.num_scheduled_tokens]
            ends.update(request.num_computed_tokens for request in running)
            return scheduled

        monkeypatch.setattr(scheduler, "schedule", watched)
        first, again = (llm.generate([prompt], greedy(1), use_tqdm=False)[0] for _ in range(2))
        assert ends == {64, 128, 200}
        assert again.num_cached_tokens == 192
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
