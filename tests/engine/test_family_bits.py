"""Every family gives a prompt the same bits: alone, in chunks and company, preempted, on a hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    failing_allocations,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.grids import at_night
from tests.models.families import SLICE

LAYERS = [4, 0, 2]
PROMPT, *OTHERS = random_prompts(17, [150, 90, 70, 1, 133])


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
    with engine(folder, max_num_batched_tokens=48, **config) as llm, failing_allocations(llm):
        crowded = llm.generate([*OTHERS, PROMPT], asked, use_tqdm=False)
        (again,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
        assert core_of(llm).scheduler._totals.num_preemptions > 2
    assert again.num_cached_tokens
    expected = rows_of(alone)
    assert torch.equal(rows_of(crowded[-1]), expected)
    assert torch.equal(rows_of(again), expected[: len(rows_of(again))])
