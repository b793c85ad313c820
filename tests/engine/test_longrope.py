"""longrope: each sequence is rotated by the factors for its own length, as in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.models import zoo
from tests.models.every_family import streams_of
from tests.models.oracle import relative_error
from vllm import LLM
from vllm.model_executor.transformers_modules import model as modules

LIMIT = 48
LAYERS = [3, 0, 4]
OTHER_MODELS = {"phimoe": "phimoe", "positions of three axes": "qwen3_5_text"}
WAYS = ["vllm", "packed", "one by one", *OTHER_MODELS]


def make_model(folder: Path, model_type: str) -> Any:
    factors = {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [2.0] * 4 + [5.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    rope |= {"original_max_position_embeddings": LIMIT, "partial_rotary_factor": 1.0}
    if model_type == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    own = {"sliding_window": None, "original_max_position_embeddings": LIMIT}
    return zoo.make_checkpoint(folder, model_type, rope_parameters=rope, **own)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "one by one":
        monkeypatch.setattr(modules, "_WAYS", modules._WAYS[1:2])
    return name


@contextmanager
def model_and_engine(way: str, folder: Path, **options: Any) -> Iterator[tuple[Any, LLM]]:
    model = make_model(folder / "model", OTHER_MODELS.get(way, "phi3"))
    options = {"skip_tokenizer_init": True, "max_model_len": 160, **options}
    options["model_impl"] = "vllm" if way == "vllm" else "transformers"
    with engine(folder / "model", **options) as llm:
        yield model, llm


def expected_rows(model: Any, token_ids: list[int], num_prompt: int) -> torch.Tensor:
    """[tokens, layers, hidden]: rows of the pass that computes a token first: the whole sequence
    once it is a long one, as in ``generate``."""
    longest = max(num_prompt, LIMIT)
    parts = [streams_of(model, token_ids[:longest])]
    if len(token_ids) > longest:
        parts.append([rows[longest:] for rows in streams_of(model, token_ids)])
    return torch.stack([torch.cat([part[layer] for part in parts]) for layer in LAYERS], dim=1)


def test_sequences_of_both_kinds_share_a_batch_and_no_block(way: str, tmp_path: Path) -> None:
    """In chunks, with prefixes in common, behind prefix hits, alone and together."""
    prompts = random_prompts(3, [20, LIMIT, LIMIT + 1, 100, 33])
    start = prompts[3]["prompt_token_ids"]
    prompts += [{"prompt_token_ids": start[:40]}, {"prompt_token_ids": start[:90]}]
    config = extraction_config(LAYERS, tmp_path / "rows")
    options = {"max_num_batched_tokens": 32, "enable_prefix_caching": True, **config}
    with model_and_engine(way, tmp_path, **options) as (model, llm):
        together = llm.generate(prompts, greedy(0), use_tqdm=False)
        again = [llm.generate([one], greedy(0), use_tqdm=False)[0] for one in prompts]
        assert sum(output.num_cached_tokens or 0 for output in again) > 100
        found = [[rows_of(output) for output in outputs] for outputs in (together, again)]
        for prompt, *both in zip(prompts, *found, strict=True):
            ids = prompt["prompt_token_ids"]
            for rows in both:
                assert relative_error(rows, expected_rows(model, ids, len(ids))) < 1e-4
            assert torch.equal(*both) or way not in ("vllm", "packed")


@pytest.mark.parametrize(
    ("way", "async_scheduling"),
    [("vllm", False), ("vllm", True), ("one by one", False), ("phimoe", True)],
    indirect=["way"],
)
def test_a_request_that_becomes_long_is_computed_again(
    way: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """Tokens are those of transformers' ``generate``, and so are the rows of each token."""
    prompts = random_prompts(4, [LIMIT - 4, 60, 7, LIMIT])
    config = extraction_config(LAYERS, tmp_path / "rows")
    options = {"max_num_batched_tokens": 40, "async_scheduling": async_scheduling, **config}
    with model_and_engine(way, tmp_path, **options) as (model, llm):
        for _ in range(2):  # the second time behind prefix hits
            outputs = llm.generate(prompts, with_output_tokens(12), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                ids, tokens = prompt["prompt_token_ids"], list(output.outputs[0].token_ids)
                assert tokens == generated(model, ids, 12)
                expected = expected_rows(model, [*ids, *tokens[:-1]], len(ids))
                assert relative_error(rows_of(output), expected) < 1e-4
        assert core_of(llm).stats().num_preemptions == 4


def generated(model: Any, token_ids: list[int], count: int) -> list[int]:
    output = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in output[0][len(token_ids) :]]
