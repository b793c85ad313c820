"""The step that measures a device's memory: it runs, and leaves no trace in what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake_card import fake_card
from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from tests.grids import at_night, grid
from tests.worker.test_recorded_steps import Recorder
from vllm import LLM
from vllm.ops.cuda import triton_attention
from vllm.ops.row_transport import DeviceRows
from vllm.platforms import get_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import gpu_model_runner, gpu_worker, profile_run

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(
    ("family", "extracts"),
    grid(
        ["llama", "mistral", "qwen3_5"],
        ["rows", "files"],
        by_day=[("llama", "rows"), ("mistral", "files"), ("qwen3_5", "files")],
    ),
)
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


def test_every_step_that_kernels_are_compiled_for_is_run(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And copies a block: ``tests/kernels`` knows from these which forms a start compiles."""
    steps: list[SchedulerOutput] = []
    execute = gpu_model_runner.GPUModelRunner.execute_model

    def watched(self: Any, scheduled: SchedulerOutput) -> Any:
        steps.append(scheduled)
        return execute(self, scheduled)

    monkeypatch.setattr(gpu_model_runner.GPUModelRunner, "execute_model", watched)
    monkeypatch.setattr(CpuPlatform, "measure_peak_bytes", lambda self, run: run() or 10_000_000)
    monkeypatch.setattr(CpuPlatform, "kv_cache_budget_bytes", lambda self, share: 26_777_216)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 96, "max_model_len": 150}
    with engine(checkpoint("llama"), kv_cache_memory_bytes=None, **sizes) as llm:
        wanted = profile_run.warm_up_steps(core_of(llm).vllm_config)
    found = {
        (step.total_num_scheduled_tokens, step.scheduled_new_reqs[0].num_computed_tokens)
        for step in steps
        if len(step.scheduled_new_reqs) == 1
    }
    assert len(wanted) >= 6 and set(wanted) <= found
    assert all(step.block_copies for step in steps)


def test_the_cpu_needs_no_profile_run() -> None:
    def run() -> None:
        raise AssertionError

    assert get_platform("cpu").measure_peak_bytes(run) == 0


MIB = 2**20


@pytest.mark.parametrize("eager", [at_night(False, id="graphs"), pytest.param(True, id="eager")])
def test_recorded_steps_and_attention_are_counted(
    eager: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 MiB are there: a step takes 100, attention 30, recorded steps 200, when there are."""
    num_measured = 0

    def held(self: CudaPlatform, make: Callable[[], object]) -> int:
        nonlocal num_measured
        make()
        num_measured += 1
        return 200 * MIB

    for module in (gpu_model_runner, gpu_worker):
        monkeypatch.setattr(module, "record_cuda_graph", Recorder)
    options: dict[str, Any] = {"device": "cuda", "max_model_len": 64, "max_num_seqs": 2}
    options["enforce_eager"] = eager
    with fake_card(monkeypatch):
        monkeypatch.setattr(CudaPlatform, "measure_peak_bytes", lambda self, run: 100 * MIB)
        monkeypatch.setattr(CudaPlatform, "measure_held_bytes", held)
        monkeypatch.setattr(gpu_worker, "attention_scratch_bytes", lambda *_: 30 * MIB)
        room = 1024 * MIB - (130 if eager else 330) * MIB
        with engine(checkpoint("llama"), kv_cache_memory_bytes=room, **options) as llm:
            assert core_of(llm).kv_cache_config.size_bytes <= room
        with pytest.raises(ValueError, match=f"kv_cache_memory_bytes={room} would fit"):
            LLM(str(checkpoint("llama")), kv_cache_memory_bytes=room + 1, **options)
        share = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}
        options |= {"max_model_len": 512, "max_num_seqs": 4096}  # who could use all of it
        with engine(checkpoint("llama"), **(options | share)) as llm:
            size = core_of(llm).kv_cache_config.size_bytes
        assert room - 513 * MIB < size <= room - 512 * MIB
        share["gpu_memory_utilization"] = 0.1
        with pytest.raises(ValueError, match=r"too small .* gpu_memory_utilization"):
            LLM(str(checkpoint("llama")), **(options | share))
    assert num_measured == (0 if eager else 4)


def test_rows_on_their_way_to_a_connector_are_counted(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": "cuda", "max_model_len": 64, "enforce_eager": True}
    options |= extraction_config([0, 2], tmp_path)
    with fake_card(monkeypatch):
        monkeypatch.setattr(CudaPlatform, "measure_peak_bytes", lambda self, run: 100 * MIB)
        room = 1024 * MIB - 100 * MIB - DeviceRows().leaving_bytes(2 * 72 * 4)
        with engine(checkpoint("llama"), kv_cache_memory_bytes=room, **options) as llm:
            assert core_of(llm).kv_cache_config.size_bytes <= room
        with pytest.raises(ValueError, match=f"kv_cache_memory_bytes={room} would fit"):
            LLM(str(checkpoint("llama")), kv_cache_memory_bytes=room + 1, **options)


def test_attention_takes_more_memory_where_its_keys_are_split() -> None:
    assert triton_attention.attention_scratch_bytes(triton_attention.SPLIT_KEYS) == 0
    most = triton_attention.attention_scratch_bytes(triton_attention.SPLIT_KEYS + 1)
    assert most == triton_attention.MAX_PARTIAL_BYTES
