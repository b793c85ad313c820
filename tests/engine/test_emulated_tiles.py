"""Engines with the kernels for AMX, whose tiles are emulated: values, and bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_tiles import with_emulated_tiles
from tests.engine.harness import (
    engine,
    extraction_config,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models.oracle import reference_run

pytestmark = [pytest.mark.isa("avx512_bf16"), pytest.mark.exhaustive]

LAYERS = [2, 4]
DTYPES = (torch.float32, torch.bfloat16)
PROMPTS = random_prompts(23, [150, 1, 37, 90, 16])
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 216, "intermediate_size": 200},
    "qwen3_5": {"linear_value_head_dim": 64, "linear_key_head_dim": 40},
    "qwen3_5 with narrow heads": {},
    "bamba": {},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As exact as transformers' in bfloat16, against a float32 run of the same weights."""
    folder = checkpoint(name.split()[0], dtype=torch.bfloat16, **FAMILIES[name])
    config, asked = extraction_config(LAYERS, tmp_path), with_output_tokens(8)
    ours, theirs = [], []
    with with_emulated_tiles() as library:
        before = library.num_products
        with engine(folder, max_num_batched_tokens=48, **config) as llm:
            together = llm.generate(PROMPTS, asked, use_tqdm=False)
        with engine(folder, enable_prefix_caching=False, **config) as llm:
            for prompt, output in zip(PROMPTS, together, strict=True):
                (alone,) = llm.generate([prompt], asked, use_tqdm=False)
                assert torch.equal(rows_of(output), rows_of(alone))
        assert library.num_products > before
    for output in together:
        rows = rows_of(output)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][: len(rows)]
        exact, rounded = (reference_run(folder, tokens, dtype).streams for dtype in DTYPES)
        for column, layer in enumerate(LAYERS):
            ours.append((rows[:, column].float() - exact[layer]).norm(dim=-1))
            theirs.append((rounded[layer].float() - exact[layer]).norm(dim=-1))
    ratios = torch.cat(ours) / torch.cat(theirs)
    assert ratios.median() <= 1.25
    assert ratios.quantile(0.9) <= 1.5
