"""The same prompt on a card, whatever happens around it: near in float32, bits counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, random_prompts, rows_of
from tests.engine.harness import with_output_tokens as and_tokens
from tests.models.oracle import relative_error
from vllm.v1.core.kv_cache_utils import blocks_per_request

pytestmark = pytest.mark.gpu

LAYERS = [0, 1, 2, 3, 4]
PROMPT = random_prompts(11, [203])[0]
OTHERS = random_prompts(12, [1, 3, 16, 31, 50, 64, 90, 127])
BEGINNINGS = [{"prompt_token_ids": PROMPT["prompt_token_ids"][:n] + [7] * 40}
              for n in (17, 100, 200)]  # fmt: skip
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest difference allowed, in units of the rms; what 16-bit rows differ by is printed too."""
Rows = dict[str, torch.Tensor]


def run(folder: Path, path: Path, calls: list[list[Any]], **options: Any) -> list[torch.Tensor]:
    """Rows of PROMPT, wherever it stands in the calls, and of the 9 tokens it goes on with."""
    found = []
    with engine(folder, **{**SMALL, **options}, **extraction_config(LAYERS, path)) as llm:
        for prompts in calls:
            outputs = llm.generate(prompts, and_tokens(10), use_tqdm=False)
            found += [rows_of(o) for o, p in zip(outputs, prompts, strict=True) if p is PROMPT]
    return found


def variants(folder: Path, path: Path, dtype: str) -> dict[str, list[torch.Tensor]]:
    """Map what happened around the prompt to its rows, each time."""

    def rows(calls: list[list[Any]], **options: Any) -> list[torch.Tensor]:
        return run(folder, path, calls, dtype=dtype, **options)

    batch = [*OTHERS[:4], PROMPT, *OTHERS[4:]]
    few = {"max_num_batched_tokens": 128}
    with engine(folder, dtype=dtype, **SMALL, **few, **extraction_config(LAYERS, path)) as llm:
        config = core_of(llm).vllm_config
        needed = 1 + blocks_per_request(config, core_of(llm).kv_cache_config.kv_cache_groups)
    return {
        **{f"chunks of {n}": rows([batch], max_num_batched_tokens=n) for n in (64, 100, 512)},
        "alone, chunks of 64": rows([[PROMPT]], max_num_batched_tokens=64),
        "recorded decode steps": rows([batch], enforce_eager=False),
        "prefix hits": rows([BEGINNINGS, [PROMPT], batch]),
        "preemption": rows(
            [[PROMPT, *random_prompts(13, [150, 203, 180, 203, 170]), PROMPT]],
            num_gpu_blocks_override=int(1.5 * needed),
            **few,
        ),
    }


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_matrix(
    family: str,
    dtype: torch.dtype,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    report: Callable[[str], None],
) -> None:
    folder, name = checkpoint(family), str(dtype)[6:]
    alone = run(folder, tmp_path, [[PROMPT]], dtype=name, enable_prefix_caching=False)[0]
    assert len(alone) == 203 + 9
    worst: dict[str, float] = {}
    for around, found in variants(folder, tmp_path, name).items():
        assert found
        # After another token was chosen the rest is another text: what went in is compared.
        pairs = [(rows[:203], alone[:203]) for rows in found]
        same = sum(int((a == b).flatten(1).all(1).sum()) for a, b in pairs)
        worst[around] = max(relative_error(a, b) for a, b in pairs)
        report(f"{family} {name}, {around}: {same} of {203 * len(pairs)} rows have the same bits, "
               f"largest difference {worst[around]:.1e} of the rms")  # fmt: skip
        if dtype is torch.float32:
            worst[around] = max(relative_error(rows, alone) for rows in found)
    assert max(worst.values()) <= TOLERANCE[dtype], worst
