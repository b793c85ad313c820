"""Quantised checkpoints in an engine: the same bits, whatever happens around a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import FORMATS, MULTIPLES, Checkpoints, quantise_checkpoint

LAYERS = [0, 2, 4]
PROMPT = random_prompts(11, [203])[0]
CASES = [
    ("llama", "int4-asymmetric", torch.float32),
    ("llama", "gptq-order", torch.bfloat16),
    ("qwen3_5", "fp8-block", torch.float32),
    ("qwen3_5", "awq", torch.bfloat16),
    *(at_night(("llama", name, torch.bfloat16)) for name in FORMATS),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    family, name, dtype = request.param
    sizes = {"hidden_size": 96, "intermediate_size": 160} if name in MULTIPLES else {}
    folder = tmp_path_factory.mktemp(name) / "plain"
    make_checkpoint(folder, family, dtype=dtype, **sizes)
    return quantise_checkpoint(folder, FORMATS[name])


def test_bits_over_batch_chunks_and_prefix(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.stored
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, enable_prefix_caching=False, **config) as llm:
        (alone,) = llm.generate([PROMPT], with_output_tokens(6), use_tqdm=False)
        expected = rows_of(alone)
    prompts = [*random_prompts(12, [1, 16, 50, 90] * 2), PROMPT]
    with engine(folder, max_num_batched_tokens=57, max_num_seqs=9, **config) as llm:
        *_, among = llm.generate(prompts, with_output_tokens(6), use_tqdm=False)
        assert torch.equal(rows_of(among), expected)
    first = PROMPT["prompt_token_ids"][:100] + [7] * 60
    with engine(folder, **config) as llm:
        llm.generate([{"prompt_token_ids": first}], greedy(2), use_tqdm=False)
        (hit,) = llm.generate([PROMPT], with_output_tokens(6), use_tqdm=False)
        assert hit.num_cached_tokens > 0
        assert torch.equal(rows_of(hit), expected)


def test_rows_are_those_of_the_dequantised_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompt = PROMPT["prompt_token_ids"]
    streams = reference_run(checkpoints.dequantised, prompt).streams
    config = extraction_config(LAYERS, tmp_path)
    with engine(checkpoints.stored, **config) as llm:
        (output,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
        rows = rows_of(output)
    theirs = reference_run(checkpoints.dequantised, prompt, rows.dtype).streams
    for column, layer in enumerate(LAYERS):
        if rows.dtype is torch.float32:
            assert relative_error(rows[:, column], streams[layer]) <= 1e-4
            continue
        our_error = (rows[:, column].float() - streams[layer]).norm(dim=-1)
        their_error = (theirs[layer].float() - streams[layer]).norm(dim=-1)
        assert our_error.median() <= 1.25 * their_error.median()
        assert our_error.quantile(0.9) <= 1.5 * their_error.quantile(0.9)
