"""Every family gives a prompt the same bits: alone, in chunks and company, preempted, on a hit."""

from __future__ import annotations

import itertools
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
from tests.models.families import SLICE
from vllm import LLM

LAYERS = [4, 0, 2]
PROMPT, *OTHERS = random_prompts(17, [150, 90, 70, 1, 133])


def run_out_of_blocks(llm: LLM) -> None:
    """Let every few allocations fail, so that the last request is preempted."""
    manager, calls = core_of(llm).scheduler.kv_cache_manager, itertools.count()
    allocate = manager.allocate

    def allocate_mostly(*args: Any, **kwargs: Any) -> Any:
        return next(calls) % 7 != 6 and allocate(*args, **kwargs)

    manager.allocate = allocate_mostly


@pytest.mark.parametrize("dtype", [torch.bfloat16, at_night(torch.float32)], ids=str)
@pytest.mark.parametrize("family", SLICE)
def test_the_same_bits(
    family: str, dtype: torch.dtype, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(family, dtype=dtype)
    config = extraction_config(LAYERS, tmp_path)
    asked = with_output_tokens(8)
    with engine(folder, enable_prefix_caching=False, **config) as llm:
        (alone,) = llm.generate([PROMPT], asked, use_tqdm=False)
    with engine(folder, max_num_batched_tokens=48, **config) as llm:
        run_out_of_blocks(llm)
        crowded = llm.generate([*OTHERS, PROMPT], asked, use_tqdm=False)
        (again,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
        assert core_of(llm).scheduler._totals.num_preemptions > 2
    assert again.num_cached_tokens
    expected = rows_of(alone)
    assert torch.equal(rows_of(crowded[-1]), expected)
    assert torch.equal(rows_of(again), expected[: len(rows_of(again))])
