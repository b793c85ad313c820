"""Decode steps through fixed buffers give what eager steps give; recordings are played by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.grids import grid
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.recorded_steps import Replay

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16, 17]
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 36,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 36,
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        "partial_rotary_factor": 0.75,
    },
}


class Recorder:
    """Repeats a function instead of a graph, with other inputs' results wiped out before."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        result = run().clone()

        def replay() -> None:
            self.batch_sizes.append(len(result))
            result.fill_(float("nan"))
            result.copy_(run())

        return replay, result


@pytest.mark.parametrize(
    ("family", "async_scheduling"),
    grid(
        ["llama", "mistral", "qwen3_5", "phi3"],
        [False, True],
        by_day=[("llama", True), ("mistral", False), ("qwen3_5", True), ("phi3", False)],
    ),
)
def test_decode_steps(
    family: str, async_scheduling: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    own = (
        LONGROPE if family == "phi3" else {}
    )  # short sequences, long ones, and some that become so
    prompts = random_prompts(40, LENGTHS)
    params = [with_output_tokens(4 * index + 2) for index in range(len(prompts))]
    arguments: dict[str, Any] = {"max_num_seqs": 6, "async_scheduling": async_scheduling}
    found, rows = [], []
    recorder = Recorder()
    for is_recorded in (False, True):
        for extraction in ({}, extraction_config([0, 4], tmp_path / str(is_recorded))):
            with engine(checkpoint(family, **own), **arguments, **extraction) as llm:
                if is_recorded:
                    core_of(llm).executor.worker.model_runner.record_decode_steps(recorder)
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            if extraction:
                rows.append([rows_of(output) for output in outputs])
    assert found[1:] == found[:-1]
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    assert set(recorder.batch_sizes) >= {1, 2, 4, 8}
    assert len(recorder.batch_sizes) >= 20


@pytest.mark.parametrize(("source", "records"), [("triton", True), ("plain", False)])
def test_plain_kernels_are_not_captured(
    source: str, records: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look at values, which a CUDA graph cannot."""
    with engine(checkpoint("llama")) as llm:
        runner = core_of(llm).executor.worker.model_runner
        with monkeypatch.context() as patch:
            patch.setattr(runner, "device", torch.device("cuda"))
            patch.setattr(gpu_model_runner, "source_of", lambda _: SimpleNamespace(name=source))
            assert runner.records_cuda_graphs == records
            patch.setattr(gpu_model_runner, "is_all_ours", lambda model: False)
            assert not runner.records_cuda_graphs
