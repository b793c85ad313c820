"""Tokens spread over ranks (decode_context_parallel_size): the values of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine, extraction_config, greedy
from tests.engine.test_ranks import (
    OPTIONS,
    PROMPTS,
    SAMPLED,
    check_hit_inside_a_block,
    check_that_a_step_fails_alone,
    results,
    same_bits,
    tokens,
)
from tests.grids import at_night
from tests.models.oracle import relative_error
from vllm import LLM
from vllm.hidden_states import HiddenStatesSample

Checkpoint = Callable[..., Path]
ONE_HEAD = {"num_key_value_heads": 1}
PAIR: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


def check_values(
    ours: list[HiddenStatesSample], whole: list[HiddenStatesSample], most: float = 1e-5
) -> None:
    for one, other in zip(ours, whole, strict=True):
        assert relative_error(one.hidden_states, other.hidden_states) < most
        for name, values in other.activations.items():
            assert relative_error(one.activations[name], values) < most
        if other.top_logprobs is not None:
            assert torch.equal(one.top_token_ids, other.top_token_ids)


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint) -> Iterator[LLM]:
    """Two ranks with half of the tokens each; both pools are NaN at the start."""
    with engine(checkpoint("llama", **ONE_HEAD), **OPTIONS, **PAIR) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


def test_values_are_those_of_one_process(pair: LLM, checkpoint: Checkpoint) -> None:
    found = results(pair)
    with engine(checkpoint("llama", **ONE_HEAD), **OPTIONS) as alone:
        check_values(found, results(alone))
        assert tokens(pair, SAMPLED) == tokens(alone, SAMPLED)
        plans = [core_of(llm).kv_cache_config for llm in (pair, alone)]
    (usual, _) = pair.collective_rpc(rank_functions.set_part_bytes, args=(1,))
    assert same_bits(results(pair), found), "head by head"
    pair.collective_rpc(rank_functions.set_part_bytes, args=(usual,))
    # A block is as large as that of one process, and has the tokens of both ranks.
    assert plans[0].block_bytes == plans[1].block_bytes
    specs = [plan.kv_cache_groups[0].kv_cache_spec for plan in plans]
    assert [spec.tokens_per_block for spec in specs] == [32, 16]
    assert core_of(pair).vllm_config.cache_config.block_size == specs[0].block_size == 16
    assert pair.collective_rpc(rank_functions.context_group) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_a_prefix_hit_ends_inside_a_block(pair: LLM) -> None:
    """Tokens of both ranks are copied with their block, and the rest of it is written anew."""
    check_hit_inside_a_block(pair)


SIZES = [
    at_night("llama", ONE_HEAD, 2, {}),
    at_night("llama", ONE_HEAD, 2, {"cp_kv_cache_interleave_size": 16}),
    at_night("llama", ONE_HEAD, 2, {"kv_cache_layout": "HND", "cp_kv_cache_interleave_size": 4}),
    at_night("llama", {**ONE_HEAD, "num_attention_heads": 4}, 4, {}),
    at_night("llama", {**ONE_HEAD, "num_attention_heads": 4}, 4, {"pipeline_parallel_size": 2}),
    at_night("llama", {"num_attention_heads": 4}, 4, {}),
    at_night("deepseek_v3", {}, 2, {"cp_kv_cache_interleave_size": 2}),
    at_night("gpt_oss", ONE_HEAD, 2, {}),
    at_night("qwen3_5", ONE_HEAD, 2, {}),
]
"""(family, its config, ranks, further options): two ranks have the tokens of a head."""


@pytest.mark.parametrize(("family", "sizes", "ranks", "options"), SIZES)
def test_chunks_and_a_tiny_pool_change_no_bit(
    family: str, sizes: dict[str, int], ranks: int, options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder, layers = checkpoint(family, **sizes), [0, 1, 2, "norm"]
    options = {**OPTIONS, **options, **PAIR, "tensor_parallel_size": ranks}
    asked = [*PROMPTS, {"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:50] + [7] * 60}]
    with engine(folder, **OPTIONS) as llm:
        whole = list(llm.extract(asked, layers=layers, top_logprobs=3))
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, greedy(7), use_tqdm=False)]
        needed = max_blocks(llm)
    found = []
    for more in ({}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": needed + 4}):
        with engine(folder, **{**options, **more}) as llm:
            llm.collective_rpc(rank_functions.poison)
            found.append(list(llm.extract(asked, layers=layers, top_logprobs=3)))
            outputs = llm.generate(asked, greedy(7), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
    check_values(found[0], whole)
    assert same_bits(*found)


def max_blocks(llm: LLM) -> int:
    """Blocks of the longest request of one process, an upper bound of those of ranks."""
    core = core_of(llm)
    groups = core.kv_cache_config.kv_cache_groups
    return sum(g.kv_cache_spec.max_blocks_per_request(core.vllm_config) for g in groups)


@pytest.mark.exhaustive
def test_files(pair: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The first rank has all rows, beside its half of the keys."""
    config = extraction_config([0, 2, 4, "norm"], tmp_path / "rows")
    with engine(checkpoint("llama", **ONE_HEAD), **OPTIONS, **PAIR, **config) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(PROMPTS, greedy(1), use_tqdm=False)
            for output, sample in zip(outputs, results(pair), strict=False):
                params: Any = output.kv_transfer_params
                rows = load_file(params["hidden_states_path"])["hidden_states"]
                assert torch.equal(rows, sample.hidden_states)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_step_that_fails_on_one_rank_fails_alone(pair: LLM, failing_rank: int) -> None:
    check_that_a_step_fails_alone(pair, failing_rank)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {**PAIR, "decode_context_parallel_size": 3}, "=3 does not divide .*=2; use 1 or"),
        at_night("llama", PAIR, r"2 ranks 1 have the same key/value heads of 'model.*; use 1, or"),
        at_night("mamba2", PAIR, r"_size=2: only attention .* layers \(.*\) does; use 1"),
        at_night("deepseek_v32", PAIR, r"_size=2: only attention layers that read all earlier"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(
    family: str, options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint(family)), **OPTIONS, **options)


@pytest.mark.exhaustive
def test_runs_of_tokens_have_to_fill_a_block(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", **ONE_HEAD)
    runs = {"cp_kv_cache_interleave_size": 32}
    with pytest.raises(ValueError, match=r"interleave_size=32 does not .* 16 .* 1, 2, 4, 8 or 16"):
        LLM(str(folder), **OPTIONS, **PAIR, **runs)
    with engine(folder, **OPTIONS, **PAIR, **runs, block_size=64) as llm:
        assert len(list(llm.extract(PROMPTS, layers=[4]))) == len(PROMPTS)
    rows = extraction_config([4], tmp_path)
    with pytest.raises(ValueError, match=r"disable_hybrid_kv_cache_manager=True with decode_con"):
        LLM(str(folder), **OPTIONS, **PAIR, **rows, disable_hybrid_kv_cache_manager=True)
