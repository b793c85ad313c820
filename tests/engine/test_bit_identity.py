"""The same prompt gives the same bits, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.grids import at_night
from vllm.v1.core.kv_cache_utils import blocks_per_request

Checkpoint = Callable[..., Path]
LAYERS = [0, 1, 2, 3, 4]
OTHERS = [1, 3, 16, 31, 50, 64, 90, 127] * 4
PROMPT = random_prompts(11, [203])[0]


def alone(folder: Path, path: Path, max_tokens: int = 16) -> torch.Tensor:
    """Rows of the prompt and its outputs, computed alone in one chunk."""
    config = extraction_config(LAYERS, path)
    with engine(folder, enable_prefix_caching=False, **config) as llm:
        (output,) = llm.generate([PROMPT], with_output_tokens(max_tokens), use_tqdm=False)
        return rows_of(output)


@pytest.fixture(
    scope="module",
    params=[
        (family, dtype)
        for family in ("llama", "mistral", "qwen3_5")
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=lambda p: f"{p[0]}-{str(p[1])[6:]}",
)
def case(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: Any
) -> tuple[Path, torch.Tensor]:
    family, dtype = request.param
    folder = checkpoint(family, dtype=dtype)
    return folder, alone(folder, tmp_path_factory.mktemp("alone"))


Case = tuple[Path, torch.Tensor]


def assert_same(rows: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(rows, expected[: len(rows)])


def test_one_token_or_sixteen(case: Case, tmp_path: Path) -> None:
    folder, expected = case
    assert len(expected) == 203 + 15
    with engine(folder, **extraction_config(LAYERS, tmp_path)) as llm:
        (output,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
    assert_same(rows_of(output), expected)


@pytest.mark.parametrize("budget", [7, at_night(33), at_night(64), 100, 1024])
def test_with_32_others_in_chunks(case: Case, budget: int, tmp_path: Path) -> None:
    folder, expected = case
    prompts = random_prompts(12, OTHERS)
    prompts.insert(5, PROMPT)
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, max_num_batched_tokens=budget, max_num_seqs=33, **config) as llm:
        outputs = llm.generate(prompts, with_output_tokens(16), use_tqdm=False)
    assert_same(rows_of(outputs[5]), expected)
    assert len(rows_of(outputs[5])) == len(expected)


@pytest.mark.parametrize("shared", [17, 100, 200])
def test_after_a_prompt_that_shares_its_beginning(case: Case, shared: int, tmp_path: Path) -> None:
    folder, expected = case
    first = PROMPT["prompt_token_ids"][:shared] + [7] * 60
    with engine(folder, **extraction_config(LAYERS, tmp_path)) as llm:
        llm.generate([{"prompt_token_ids": first}], greedy(2), use_tqdm=False)
        (output,) = llm.generate([PROMPT], with_output_tokens(16), use_tqdm=False)
        (again,) = llm.generate([PROMPT], with_output_tokens(16), use_tqdm=False)
    assert output.num_cached_tokens > 0 or shared < 64
    assert again.num_cached_tokens == 192
    assert_same(rows_of(output), expected)
    assert_same(rows_of(again), expected)


def fewest_blocks(folder: Path, path: Path) -> int:
    """Blocks of the smallest pool that holds one request of 256 tokens."""
    config = extraction_config(LAYERS, path)
    with engine(folder, max_model_len=256, max_num_batched_tokens=128, **config) as llm:
        core = core_of(llm)
        groups = core.kv_cache_config.kv_cache_groups
        return 1 + blocks_per_request(core.vllm_config, groups)


@pytest.mark.parametrize(
    "pools", [(1.1, 1.7, 2.5), at_night((1.1, 1.4, 1.7, 2.0, 2.5, 3.0))], ids=str
)
@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(
    case: Case, caching: bool, pools: tuple[float, ...], tmp_path: Path
) -> None:
    """``pools``: sizes, to that of the smallest pool that holds one request."""
    folder, expected = case
    prompts = [PROMPT, *random_prompts(13, [150, 203, 180, 203, 170]), PROMPT]
    config = extraction_config(LAYERS, tmp_path)
    num_preemptions, fewest = 0, fewest_blocks(folder, tmp_path)
    for share in pools:
        with engine(
            folder,
            max_model_len=256,
            num_gpu_blocks_override=int(share * fewest),
            max_num_batched_tokens=128,
            enable_prefix_caching=caching,
            **config,
        ) as llm:
            step = core_of(llm).scheduler.schedule

            def counting(step: Any = step) -> Any:
                nonlocal num_preemptions
                scheduled = step()
                num_preemptions += len(scheduled.preempted_req_ids)
                return scheduled

            core_of(llm).scheduler.schedule = counting
            outputs = llm.generate(prompts, with_output_tokens(16), use_tqdm=False)
        assert_same(rows_of(outputs[0]), expected)
        assert_same(rows_of(outputs[-1]), expected)
    assert num_preemptions > 0


@pytest.mark.parametrize("pack", [1, 2])
def test_attention_pack_size(checkpoint: Checkpoint, pack: int, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5")
    expected = alone(folder, tmp_path / "alone")
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, attn_pack_size=pack, max_num_batched_tokens=96, **config) as llm:
        (output,) = llm.generate([PROMPT], with_output_tokens(16), use_tqdm=False)
        (again,) = llm.generate([PROMPT], with_output_tokens(16), use_tqdm=False)
    assert_same(rows_of(output), expected)
    assert_same(rows_of(again), expected)
    assert again.num_cached_tokens == 192


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_size(checkpoint: Checkpoint, block_size: int, tmp_path: Path) -> None:
    folder = checkpoint("mistral")
    expected = alone(folder, tmp_path / "alone")
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, block_size=block_size, **config) as llm:
        (output,) = llm.generate([PROMPT], with_output_tokens(16), use_tqdm=False)
    assert_same(rows_of(output), expected)
