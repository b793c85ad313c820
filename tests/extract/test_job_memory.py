"""The memory that a job holds does not depend on how much there is to do."""

from __future__ import annotations

import os
import resource
import traceback
from pathlib import Path

import pytest
import torch

from tests.extract.job_harness import run, token_lists, write_token_ids
from vllm.entrypoints.extract import worker

SAMPLE_BYTES = 200 * 3 * 72 * 4
"""Bytes of the longest sample: tokens, layers, hidden size, float32."""


def growth_kib(model: Path, data: Path, output: Path) -> int:
    """By how much the peak of a child that runs the job exceeds what it began with."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # makes torch's pool anew before several threads could
        status = 1
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            status = run(model, data, output, shard_size_gib=1e-3)
            growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(write_end, growth.to_bytes(8, "little", signed=True))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as report:
        growth = int.from_bytes(report.read(), "little", signed=True)
    assert os.waitpid(child, 0)[1] == 0
    return growth


def test_peak_memory(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING_BYTES", 4 * SAMPLE_BYTES)
    data = [
        write_token_ids(tmp_path / f"{count}.jsonl", token_lists(1, count, longest=200))
        for count in (20, 200, 800)
    ]
    run(tiny_llama, data[0], tmp_path / "warm")  # modules are loaded once, here
    small, large = (
        growth_kib(tiny_llama, path, tmp_path / f"output_{path.stem}") for path in data[1:]
    )
    rows_kib = 600 * SAMPLE_BYTES // 2 // 1024
    assert large - small < rows_kib / 5, (small, large, rows_kib)
