"""Ctrl-C: the call ends, its files go, the engine can go on, the process can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    check_nothing_is_left,
    core_of,
    engine,
    extraction_config,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.engine.storage import assert_no_half_files, names_in
from tests.grids import at_night
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_saver import RowSaver
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.step_sampler import StepSampler

Checkpoint = Callable[..., Path]
ROOT = Path(__file__).parents[2]
PROMPTS = random_prompts(8, [40, 3, 70, 16])


@pytest.fixture(params=["llama", "qwen3_5"])
def llm(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Iterator[LLM]:
    """Several steps a call, and little room for rows on their way."""
    options = {"max_bytes_in_flight": 4000}
    config = extraction_config([1, 4], tmp_path, **options)
    with engine(checkpoint(request.param), max_num_batched_tokens=32, **config) as made:
        yield made


def all_rows(llm: LLM) -> list[torch.Tensor]:
    outputs = llm.generate(PROMPTS, with_output_tokens(4), use_tqdm=False)
    return [rows_of(output) for output in outputs]


def remove_files(folder: Path) -> None:
    for name in names_in(folder):
        (folder / name).unlink(missing_ok=True)


def nth_call(function: Callable[..., Any], number: int, action: Callable[[], Any]) -> Any:
    """``function``, which does ``action`` first when it is called for that time."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return function(*args, **kwargs)

    return wrapped


def interrupt() -> None:
    raise KeyboardInterrupt


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_step(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = all_rows(llm)
    model = core_of(llm).executor.worker.model_runner.model
    for number in (1, 2, 4, 6):
        remove_files(tmp_path)
        llm.reset_prefix_cache()
        monkeypatch.setattr(model, "forward", nth_call(model.forward, number, interrupt))
        with pytest.raises(KeyboardInterrupt):
            all_rows(llm)
        monkeypatch.undo()
        check_nothing_is_left(llm)
        assert not llm.llm_engine.has_unfinished_requests()
        assert_no_half_files(tmp_path)
    assert all(map(torch.equal, all_rows(llm), expected))


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (EngineCore, "add_request"),
        (Scheduler, "schedule"),
        (Scheduler, "_admit"),
        (GPUModelRunner, "_update_states"),
        (StepSampler, "sample"),
        (RowSaver, "_send"),
        (RowSaver, "end_requests"),
        (Scheduler, "update_from_output"),
    ],
)
def test_ctrl_c_amid_bookkeeping_waits_for_its_end(
    llm: LLM, owner: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = all_rows(llm)
    handler = signal.getsignal(signal.SIGINT)
    for number in (1, 3):
        remove_files(tmp_path)
        llm.reset_prefix_cache()
        monkeypatch.setattr(owner, method, nth_call(vars(owner)[method], number, press_ctrl_c))
        with pytest.raises(KeyboardInterrupt):
            all_rows(llm)
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is handler
        check_nothing_is_left(llm)
        assert_no_half_files(tmp_path)
    assert all(map(torch.equal, all_rows(llm), expected))
    budget = core_of(llm).executor.worker.model_runner.connector.connector._saver._budget
    assert budget.stats().bytes_in_flight == 0


class LateError(Exception):
    """The program's limit of time."""


def test_an_alarm_of_the_program_waits_as_ctrl_c_does(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler's exception comes out of the call, also where a failure would be an answer."""

    def be_late(number: int, frame: Any) -> None:
        raise LateError

    expected = all_rows(llm)
    model = core_of(llm).executor.worker.model_runner.model
    places = [(Scheduler, "schedule"), (EngineCore, "add_request"), (StepSampler, "sample")]
    before = signal.signal(signal.SIGALRM, be_late)
    try:
        for owner, name in [*places, (RowSaver, "_send"), (model, "forward")]:
            remove_files(tmp_path)
            llm.reset_prefix_cache()
            ring = nth_call(getattr(owner, name), 2, lambda: signal.raise_signal(signal.SIGALRM))
            monkeypatch.setattr(owner, name, ring)
            with pytest.raises(LateError):
                all_rows(llm)
            monkeypatch.undo()
            assert signal.getsignal(signal.SIGALRM) is be_late
            check_nothing_is_left(llm)
            assert_no_half_files(tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(map(torch.equal, all_rows(llm), expected))


def test_requests_of_others_survive_an_interrupt_between_steps(llm: LLM, tmp_path: Path) -> None:
    """A call that is interrupted drops its own requests only."""
    expected = all_rows(llm)
    llm.llm_engine.add_request("other", PROMPTS[0], with_output_tokens(4))
    bar = nth_call(lambda **_: pytest.fail("made"), 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1:], with_output_tokens(4), use_tqdm=bar)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    finished = [output for output in outputs if output.finished]
    assert [output.request_id for output in finished] == ["other"]
    assert torch.equal(rows_of(finished[0]), expected[0])


# ---- the process


CHILD = """
import sys

from vllm import LLM, SamplingParams

folder, storage, how = sys.argv[1:]
hf_config = {"eagle_aux_hidden_state_layer_ids": [1, 4]}
llm = LLM(
    folder,
    kv_cache_memory_bytes=2**24,
    max_num_batched_tokens=48,
    speculative_config={
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
    },
    kv_transfer_config={
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": storage},
    },
)
prompts = [[1 + i % 300] * 100 for i in range(20_000)]
params = SamplingParams(max_tokens=1, temperature=0.0)
if how == "generate":
    model = llm.llm_engine.engine_core.executor.worker.model_runner.model
    model.register_forward_hook(lambda *_: print("step", flush=True))
    llm.generate(prompts, params, use_tqdm=False)
else:
    for index, prompt in enumerate(prompts[:5]):
        llm.llm_engine.add_request(str(index), prompt, params)
    for _ in range(4):
        llm.llm_engine.step()
    if how == "raise":
        raise SystemExit(3)
"""


def start_child(folder: Path, storage: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(storage), how],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_session_is_empty(leader: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(leader, 0)


def test_ctrl_c_ends_the_process(checkpoint: Checkpoint, tmp_path: Path) -> None:
    child = start_child(checkpoint("qwen3_5"), tmp_path, "generate")
    assert child.stdout is not None
    for _ in range(20):
        assert child.stdout.readline() == "step\n"
    os.killpg(child.pid, signal.SIGINT)
    start = time.monotonic()
    _, errors = child.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert child.returncode == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert_session_is_empty(child.pid)
    assert_no_half_files(tmp_path)


@pytest.mark.parametrize(("how", "status"), [at_night("leave", 0), ("raise", 3)])
def test_a_process_that_ends_amid_requests_leaves_no_half_files(
    how: str, status: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    child = start_child(checkpoint("llama"), tmp_path, how)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == status, errors
    assert errors == ""
    assert_session_is_empty(child.pid)
    assert 0 < len(assert_no_half_files(tmp_path)) < 5
