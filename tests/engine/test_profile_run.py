"""The step that measures a device's memory: it runs, and leaves no trace in what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from vllm.platforms import get_platform
from vllm.platforms.cpu import CpuPlatform

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.parametrize("extracts", ["rows", "files"])
def test_profile_run(
    family: str,
    extracts: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = random_prompts(31, [40, 100])
    arguments: dict[str, Any] = {"max_num_batched_tokens": 96, "max_model_len": 150}
    if extracts == "files":
        arguments |= extraction_config([0, 2], tmp_path)
    with engine(checkpoint(family), **arguments) as llm:
        expected = llm.generate(prompts, greedy(5), use_tqdm=False)
    num_runs = 0

    def measure(self: CpuPlatform, run: Callable[[], None]) -> int:
        nonlocal num_runs
        run()
        num_runs += 1
        return 10_000_000

    monkeypatch.setattr(CpuPlatform, "measure_peak_bytes", measure)
    monkeypatch.setattr(CpuPlatform, "kv_cache_budget_bytes", lambda self, share: 26_777_216)
    with engine(checkpoint(family), kv_cache_memory_bytes=None, **arguments) as llm:
        assert core_of(llm).kv_cache_config.size_bytes <= 16_777_216
        outputs = llm.generate(prompts, greedy(5), use_tqdm=False)
    assert num_runs == 1
    for output, one in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == one.outputs[0].token_ids


def test_the_cpu_needs_no_profile_run() -> None:
    def run() -> None:
        raise AssertionError

    assert get_platform("cpu").measure_peak_bytes(run) == 0
