"""The engine on a card against transformers on the CPU: rows, tokens, ways to the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.models.oracle import reference_run, relative_error
from vllm import LLM
from vllm.hidden_states import ExtractRequest

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]
Report = Callable[[str], None]
FAMILIES = ["llama", "mistral", "qwen3_5", "minicpm3"]
LENGTHS = [5, 33, 70, 1, 130, 16, 200]
LAYERS = [0, 1, 3, 4]
PROMPTS = random_prompts(3, LENGTHS)
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
reference = functools.cache(reference_run)


def errors(rows: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Median and 90th percentile of the absolute errors, over the rms of what is expected."""
    expected = expected.double()
    error = (rows.double() - expected).abs().flatten() / expected.square().mean().sqrt()
    median, high = error.quantile(torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
    return median, high


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_float32(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows within 1e-4 of the rms (tf32 would be off by more), and the same greedy tokens."""
    folder = checkpoint(family)
    with engine(folder, **SMALL, **extraction_config(LAYERS, tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    for output in outputs:
        rows = rows_of(output)
        token_ids = (*output.prompt_token_ids, *output.outputs[0].token_ids)
        found = reference(folder, token_ids)
        for column, layer in enumerate(LAYERS):
            assert relative_error(rows[:, column], found.streams[layer][: len(rows)]) <= 1e-4
        expected = found.logits.argmax(-1)[len(rows) - 1 : -1]
        assert list(output.outputs[0].token_ids) == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_16_bits_are_as_near_as_transformers(
    family: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path, report: Report
) -> None:
    folder = checkpoint(family)
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, dtype=str(dtype)[6:], **SMALL, **config) as llm:
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    ours, theirs, exact = [], [], []
    for output in outputs:
        token_ids = tuple(output.prompt_token_ids or ())
        ours.append(rows_of(output).float())
        for found, kind in ((theirs, dtype), (exact, torch.float32)):
            streams = reference(folder, token_ids, kind).streams
            found.append(torch.stack([streams[layer] for layer in LAYERS], 1).float())
    mine = errors(torch.cat(ours), torch.cat(exact))
    other = errors(torch.cat(theirs), torch.cat(exact))
    report(f"{family} {dtype}: error {mine[0]:.2e} / {mine[1]:.2e} (median / 90th percentile), "
           f"transformers {other[0]:.2e} / {other[1]:.2e}")  # fmt: skip
    assert mine[0] <= 1.2 * other[0]
    assert mine[1] <= 1.2 * other[1]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_extract_hands_out_the_rows_of_the_files(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    with engine(folder, **SMALL, **extraction_config(LAYERS, tmp_path)) as llm:
        files = [rows_of(output) for output in llm.generate(PROMPTS, greedy(), use_tqdm=False)]
    half = [ExtractRequest(prompt["prompt_token_ids"], layers=[3, 1], positions="every:3",
                           dtype="float16") for prompt in PROMPTS]  # fmt: skip
    with engine(folder, **SMALL) as llm:
        samples = list(llm.extract(PROMPTS, LAYERS, ordered=True))
        halves = list(llm.extract(half, ordered=True))
    for sample, small, rows in zip(samples, halves, files, strict=True):
        assert relative_error(sample.hidden_states, rows) <= 1e-5
        expected = sample.hidden_states[::3, [2, 1]].half()
        torch.testing.assert_close(small.hidden_states, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_run_ahead_and_recorded_steps_change_nothing(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    params = [greedy(4 * index + 2) for index in range(len(PROMPTS))]
    found = []
    for runs_ahead in (True, False):
        for eager in (False, True):
            options = {"async_scheduling": runs_ahead, "enforce_eager": eager}
            with engine(folder, **SMALL, **options) as llm:
                assert (runner_of(llm).recorded_steps is None) == eager
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[1:] == found[:-1]


@pytest.mark.parametrize("option", ["attn_pack_size", "block_size"])
def test_the_cut_of_the_pool_changes_no_bit(
    option: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_5" if option == "attn_pack_size" else "mistral")
    config = extraction_config(LAYERS, tmp_path)
    found: list[tuple[list[torch.Tensor], list[Any]]] = []
    for value in (None, 1, 2) if option == "attn_pack_size" else (None, 16, 48, 128):
        with engine(folder, dtype="bfloat16", **{option: value}, **SMALL, **config) as llm:
            outputs = llm.generate(PROMPTS, greedy(8), use_tqdm=False)
        rows = [rows_of(output) for output in outputs]
        found.append((rows, [output.outputs[0].token_ids for output in outputs]))
    for rows, token_ids in found[1:]:
        assert token_ids == found[0][1]
        assert all(torch.equal(a, b) for a, b in zip(rows, found[0][0], strict=True))


def test_a_pool_that_does_not_fit_says_what_would(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"max_model_len.*gpu_memory_utilization"):
        LLM(str(checkpoint("llama")), max_model_len=512, gpu_memory_utilization=0.0001)


def runner_of(llm: LLM) -> Any:
    return core_of(llm).executor.worker.model_runner
