"""Blocks in host memory: what is loaded is what would have been computed, bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector.loading import (
    FAMILIES,
    OFFLOADING,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from vllm import LLM
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

Checkpoint = Callable[..., Path]
LONG = {"max_position_embeddings": 2048}
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(71, [600])]
SIZE = {"cpu_bytes_to_use": 2**22}
PROMPTS = [TEXT[:n] + [n % 300] * 20 for n in (400, 333, 64, 15, 577)]


def fresh(folder: Path, path: Path, prompts: list[list[int]], max_tokens: int = 4) -> Any:
    """Outputs of an engine without any cache."""
    arguments = beside_extraction(path)
    with engine(folder, max_model_len=1024, enable_prefix_caching=False, **arguments) as llm:
        return ask(llm, prompts, max_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_tokens_after_a_load_are_those_computed(
    family: str, budget: int, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, dtype=dtype, **LONG)
    expected = fresh(folder, tmp_path / "fresh", PROMPTS)
    arguments = beside_extraction(tmp_path, OFFLOADING)
    options = {"max_model_len": 1024, "max_num_batched_tokens": budget, "dtype": "auto"}
    with engine(folder, **options, **arguments) as llm:
        same(ask(llm, PROMPTS), expected)
        forget(llm)
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        found = num_cached(outputs)
        assert [n // 16 * 16 for n in (419, 352, 83, 34, 596)] == found
        # Some is in the pool again, the rest is loaded.
        longer = [p + [7] * 40 for p in PROMPTS]
        llm.reset_prefix_cache()
        ask(llm, [TEXT[:160]])
        outputs = ask(llm, longer)
        assert all(n >= 16 for n in num_cached(outputs))
    same(outputs, fresh(folder, tmp_path / "longer", longer))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_that_holds_one_request_at_a_time(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Preemptions, chunks, hits in the pool and loads at once."""
    folder = checkpoint(family, **LONG)
    prompts = [TEXT[:n] + [n % 300] * 9 for n in range(40, 200, 16)]
    expected = fresh(folder, tmp_path / "fresh", prompts, 120)
    arguments = beside_extraction(tmp_path, OFFLOADING)
    options = {"max_model_len": 420, "max_num_batched_tokens": 96, "kv_cache_memory_bytes": 2**20}
    with engine(folder, **options, **arguments) as llm:
        for _ in range(3):
            outputs = ask(llm, prompts, 120)
            same(outputs, expected)
        assert core_of(llm).scheduler.stats().num_preemptions
        assert min(num_cached(outputs)) >= 48


def test_host_memory_is_free_after_shutdown(checkpoint: Checkpoint) -> None:
    llm = LLM(str(checkpoint("llama")), max_model_len=64, kv_offloading_size=0.01)
    connector = core_of(llm).executor.worker.model_runner.connector.connector
    kept = [weakref.ref(tensor) for tensor in (connector._copies.memory, connector._pool)]
    del connector
    gc.disable()  # a collection may be long in coming
    try:
        llm.shutdown()
        assert [tensor() for tensor in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_extraction(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family, **LONG)
    with engine(folder, max_model_len=1024, enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    with engine(folder, max_model_len=1024, kv_offloading_size=0.1) as llm:
        llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        forget(llm)
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert min(num_cached(outputs)) >= 32
        for one, other in zip(outputs, expected, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
        # Rows that the caller wants are computed; those behind a loaded prefix too.
        forget(llm)
        positions = range(500, 590)
        (sample,) = llm.extract([TEXT[:590]], layers=[0, 2], positions=positions)
        (whole,) = llm.extract([TEXT[:590]], layers=[0, 2])
        assert torch.equal(sample.hidden_states, whole.hidden_states[500:590])


def test_little_host_memory_keeps_what_was_used_last(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("llama", **LONG)
    connector = {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 2**20}}
    with engine(folder, max_model_len=1024, **only(connector)) as llm:
        for n in range(12):
            llm.generate([[n] * 300], greedy(1), use_tqdm=False)
        forget(llm)
        outputs = llm.generate([[11] * 300, [0] * 300], greedy(1), use_tqdm=False)
        assert num_cached(outputs) == [288, 0]
        llm.llm_engine.engine_core.scheduler.connector._host.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_the_pool_has_overwritten_are_all_found(
    family: str, checkpoint: Checkpoint
) -> None:
    """Tokens stay as long as the states behind them, those of the first prompts too."""
    folder = checkpoint(family, **LONG)
    prompts = [[n] * 16 + TEXT[:384] for n in range(6)]
    options: dict[str, Any] = {"max_model_len": 480, "max_num_seqs": 1}
    with engine(folder, num_gpu_blocks_override=70, **options, **only(OFFLOADING)) as llm:
        for tail in (3, 4):
            outputs = []
            for prompt in prompts:
                outputs += llm.generate([prompt + [tail] * 20], greedy(1), use_tqdm=False)
        assert min(num_cached(outputs)) >= 384
        core_of(llm).scheduler.connector._host.check_integrity()


def test_prompts_of_one_step_all_keep_the_state_at_their_end(checkpoint: Checkpoint) -> None:
    """In a pool without room for the states between."""
    prompts = [[n] * 16 + TEXT[:384] for n in range(4)]
    options: dict[str, Any] = {"max_model_len": 480, "num_gpu_blocks_override": 60}
    with engine(checkpoint("qwen3_5", **LONG), **options, **only(OFFLOADING)) as llm:
        for pair in (prompts[:2], prompts[2:]):
            llm.generate(pair, greedy(1), use_tqdm=False)
        forget(llm)
        outputs = llm.generate([p + [7] * 20 for p in prompts], greedy(1), use_tqdm=False)
        assert min(num_cached(outputs)) >= 384


def with_options(**options: Any) -> dict[str, Any]:
    return {**OFFLOADING, "kv_connector_extra_config": options}


def books_of(llm: Any) -> Any:
    """The scheduler half of the only connector."""
    return core_of(llm).scheduler.connector._host


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_prompts_are_found_up_to_a_multiple_of_the_block_size(
    family: str, checkpoint: Checkpoint
) -> None:
    """Blocks of the pool hold 16 tokens; whole blocks of 64 go together."""
    connector = with_options(num_cpu_blocks=20, block_size=64)
    with engine(checkpoint(family, **LONG), max_model_len=1024, **only(connector)) as llm:
        llm.generate([TEXT[:200], TEXT[:60]], greedy(1), use_tqdm=False)
        for prompt, found in (
            (TEXT[:240], 192), (TEXT[:100] + [7] * 80, 64), (TEXT[:60] + [8] * 9, 0),
        ):  # fmt: skip
            forget(llm)
            (output,) = llm.generate([prompt], greedy(4), use_tqdm=False)
            assert output.num_cached_tokens == found
        forget(llm)
        books_of(llm).check_integrity()
        sizes = {len(c.blocks) for c in books_of(llm)._contents.values()}
        assert sizes == {4}


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize(
    ("family", "chunk"),
    [("llama", {"block_size": 64}), ("qwen3_5", {"blocks_per_chunk": 3}), ("qwen2", {})],
)
def test_chunks_and_policies_in_memory_that_is_too_small(
    family: str, chunk: dict[str, int], policy: str, checkpoint: Checkpoint
) -> None:
    """Loads, evictions and preemptions at once: tokens are those computed, the books agree."""
    folder = checkpoint(family, **LONG)
    prompts = [TEXT[:n] + [n % 300] * 9 for n in range(40, 300, 32)]
    with engine(folder, max_model_len=420, enable_prefix_caching=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(40))]
    connector = with_options(cpu_bytes_to_use=2**20, eviction_policy=policy, **chunk)
    small: dict[str, Any] = {"max_num_batched_tokens": 96, "kv_cache_memory_bytes": 2**20}
    with engine(folder, max_model_len=420, **small, **only(connector)) as llm:
        for _ in range(3):
            outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected
            forget(llm)
            books_of(llm).check_integrity()
        assert max(num_cached(outputs)) >= 32


def test_a_connector_that_fails_in_the_middle_leaves_the_books_right(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads that fail are computed, of saves the step ends; later everything is found again."""
    folder = checkpoint("qwen3_5", **LONG)
    prompts = [[n] * 16 + TEXT[:200] for n in range(3)]
    others = [prompt[:170] + [9] * 40 for prompt in prompts]
    with engine(folder, max_model_len=480, enable_prefix_caching=False) as llm:
        expected, computed = (tokens_of(llm, asked) for asked in (prompts, others))
    arguments = only(OFFLOADING, kv_load_failure_policy="recompute")
    with engine(folder, max_model_len=480, **arguments) as llm:
        assert tokens_of(llm, prompts) == expected
        forget(llm)
        copies = core_of(llm).executor.worker.model_runner.connector.connector._copies
        for way, found in (("load", computed), ("save", [[]] * 3)):
            with monkeypatch.context() as patch:
                fails = Mock(side_effect=OSError("the memory is gone"))
                patch.setattr(copies, way, fails)
                assert tokens_of(llm, others) == found
                assert fails.called
        books_of(llm).check_integrity()
        forget(llm)
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        assert min(num_cached(outputs)) >= 160
        forget(llm)
        books_of(llm).check_integrity()
        assert not books_of(llm)._held and not books_of(llm)._pending


def tokens_of(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_of_a_prompt_that_host_memory_does_not_hold_the_beginning_stays(
    checkpoint: Checkpoint,
) -> None:
    connector = {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 2**18}}
    with engine(checkpoint("llama", **LONG), max_model_len=1024, **only(connector)) as llm:
        for _ in range(2):
            forget(llm)
            (output,) = llm.generate([TEXT], greedy(1), use_tqdm=False)
        assert output.num_cached_tokens == 15 * 16  # 16 blocks of 16 KiB, one of them null


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_bytes_to_use": 10}, r"cpu_bytes_to_use=10 .* use at least \d+"),
        ({}, "cpu_bytes_to_use is missing"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use=True"),
        ({"cpu_bytes_to_use": float("inf")}, "cpu_bytes_to_use=inf"),
        ({"num_cpu_blocks": 0}, "num_cpu_blocks=0"),
        ({**SIZE, "num_cpu_blocks": 5}, "num_cpu_blocks=5 say the same"),
        ({**SIZE, "eviction_policy": "acr"}, "eviction_policy='acr' .* 'arc'"),
        ({**SIZE, "block_size": 24}, "block_size=24 .* use a multiple of 16"),
        ({**SIZE, "block_size": 16.0}, r"block_size=16\.0"),
        ({**SIZE, "block_size": 32, "blocks_per_chunk": 2}, "blocks_per_chunk=2 say the same"),
        ({**SIZE, "blocks_per_chunk": -1}, "blocks_per_chunk=-1"),
        ({**SIZE, "spec_name": "x"}, "spec_name='x'"),
        ({**SIZE, "blok_size": 16}, "unknown key 'blok_size'.*'block_size'"),
        ({"cpu_bytes_to_use": 2**50}, r"host memory of 1\.00 PiB|host memory of 1024\.00 TiB"),
    ],
)
def test_options_that_mean_nothing(
    options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    connector = {**OFFLOADING, "kv_connector_extra_config": options}
    with (
        pytest.raises(ValueError, match=message),
        engine(checkpoint("llama"), **only(connector)),
    ):
        pass


@pytest.mark.parametrize("alone", [True, False])
def test_it_forgets_with_the_prefix_cache_when_asked_to(
    alone: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arguments = only(OFFLOADING) if alone else beside_extraction(tmp_path, OFFLOADING)
    with engine(checkpoint("llama"), **arguments) as llm:
        ask(llm, PROMPTS[:3])
        assert llm.reset_prefix_cache()
        assert max(num_cached(ask(llm, PROMPTS[:3])))
        assert llm.reset_prefix_cache(reset_connector=True)
        assert not max(num_cached(ask(llm, PROMPTS[:3])))
    with engine(checkpoint("llama")) as llm:
        assert llm.reset_prefix_cache()
        assert not llm.reset_prefix_cache(reset_connector=True)


def test_what_went_while_a_request_waited_is_not_held(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), **only(OFFLOADING)) as llm:
        llm.generate([TEXT[:96]], greedy(1), use_tqdm=False)
        message = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=TEXT[:96],
            sampling_params=greedy(1),
            arrival_time=0.0,
        )
        request, connector = Request(message), core_of(llm).scheduler.connector
        assert connector.get_num_new_matched_tokens(request, 0)[0]
        assert connector.reset_cache()
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        blocks = core_of(llm).scheduler.kv_cache_manager.blocks("r")
        connector.update_state_after_alloc(request, blocks, 0)
        connector.request_finished(request, [])
        books_of(llm).check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_prefix_caching_it_still_finds_what_it_keeps(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The pool finds nothing then; kept states and rows are there for the connector."""
    folder = checkpoint(family, **LONG)
    expected = fresh(folder, tmp_path / "fresh", PROMPTS)
    options: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False}
    with engine(folder, **options, **beside_extraction(tmp_path, OFFLOADING)) as llm:
        same(ask(llm, PROMPTS), expected)
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        assert [n // 16 * 16 for n in (419, 352, 83, 34, 596)] == num_cached(outputs)
        assert core_of(llm).scheduler.stats().prefix_cache_queries == 0
    with engine(folder, **options, **beside_extraction(tmp_path)) as llm:
        same(ask(llm, PROMPTS), expected)
        assert num_cached(ask(llm, PROMPTS)) == [0] * 5
