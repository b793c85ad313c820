"""A step is queued without waiting for the device, whatever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.engine.sampling_settings import ALL_SETTINGS, all_params
from vllm import LLM

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]
LENGTHS = [5, 33, 70, 1, 130, 16, 200]
PROMPTS = random_prompts(5, LENGTHS)
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256}


@contextmanager
def no_waiting(llm: LLM) -> Iterator[None]:
    """Inside the block a step that waits for the device ends in an error."""
    runner = core_of(llm).executor.worker.model_runner
    execute = runner.execute_model

    def watched(scheduled: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.execute_model = watched
    try:
        yield
    finally:
        del runner.execute_model


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_rows_to_files_and_decoding(
    family: str, eager: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = extraction_config([0, 2, 4], tmp_path)
    with engine(checkpoint(family), enforce_eager=eager, **SMALL, **config) as llm:
        expected = llm.generate(PROMPTS, greedy(9), use_tqdm=False)
        known = [rows_of(output) for output in expected]
        core_of(llm).reset_prefix_cache()
        with no_waiting(llm):
            for _ in range(2):  # then with prefix hits: blocks are copied, states resumed
                outputs = llm.generate(PROMPTS, greedy(9), use_tqdm=False)
                for output, rows in zip(outputs, known, strict=True):
                    torch.testing.assert_close(rows_of(output), rows, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_sampling(family: str, eager: bool, checkpoint: Checkpoint) -> None:
    """All ways to choose a token in one batch; the same tokens again, watched."""
    prompts = random_prompts(6, LENGTHS * 3)[: len(ALL_SETTINGS)]
    options: dict[str, Any] = {"enforce_eager": eager, "max_logprobs": -1, **SMALL}
    with engine(checkpoint(family), enable_prefix_caching=False, **options) as llm:
        expected = llm.generate(prompts, all_params(9), use_tqdm=False)
        with no_waiting(llm):
            outputs = llm.generate(prompts, all_params(9), use_tqdm=False)
    for output, other, settings in zip(outputs, expected, ALL_SETTINGS, strict=True):
        assert output.outputs[0].finish_reason != "error", output.outputs[0].stop_reason
        assert output.outputs[0].token_ids == other.outputs[0].token_ids, settings
        assert len(output.prompt_logprobs or []) == len(other.prompt_logprobs or [])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "fp8"])
def test_rows_to_the_caller(family: str, dtype: str, checkpoint: Checkpoint) -> None:
    with engine(checkpoint(family), dtype="bfloat16", **SMALL) as llm:
        known = list(llm.extract(PROMPTS, [1, 4], dtype=dtype, ordered=True))
        core_of(llm).reset_prefix_cache()
        with no_waiting(llm):
            samples = list(llm.extract(PROMPTS, [1, 4], dtype=dtype, ordered=True))
    for sample, before in zip(samples, known, strict=True):
        rows, expected = sample.hidden_states.float(), before.hidden_states.float()
        assert (rows - expected).abs().median() <= 0.1 * expected.abs().median()
