"""Engines whose processes somebody else starts: the bits of "mp" in each, failures, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.engine.external_process import check_values, planted_failures, values
from tests.engine.harness import engine
from tests.engine.test_ranks import OPTIONS
from tests.grids import at_night
from tests.models.oracle import relative_error
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.utils.network_utils import get_open_port
from vllm.v1.executor import external_launcher
from vllm.v1.executor.gloo_wiring import GlooConnections

Checkpoint = Callable[..., Path]
Options = dict[str, Any]


@contextmanager
def processes(
    checkpoint: Path, results: Path, options: Options | list[Options], calls: Sequence[str], n: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start ``n`` processes that make the calls; they are killed at the end."""
    given = [{**OPTIONS, **one} for one in options] if isinstance(options, list) else None
    text = json.dumps(given or {**OPTIONS, **options})  # type: ignore[dict-item]
    module = "tests.engine.external_process"
    command = [sys.executable, "-m", module, str(checkpoint), str(results), text, *calls]
    place = {"WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_open_port()}
    started = []
    try:
        for rank in range(n):
            own = {**place, "RANK": rank, "LOCAL_RANK": rank}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            started.append(subprocess.Popen(command, env=environment))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def results_of(
    checkpoint: Path,
    folder: Path,
    options: Options | list[Options],
    calls: Sequence[str],
    n: int = 2,
) -> list[dict[str, Any]]:
    with processes(checkpoint, folder / "results", options, calls, n) as started:
        statuses = [process.wait(120) for process in started]
    assert statuses == [0] * n
    return [load(folder, rank) for rank in range(n)]


def load(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"results.{rank}", weights_only=False)
    return found


@pytest.mark.parametrize(
    "size",
    [
        "tensor_parallel_size",
        at_night("pipeline_parallel_size"),
        at_night("prefill_context_parallel_size"),
    ],
)
def test_engines_that_plan_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """Two ranks on threads of this process, with small steps and a pool in which few fit."""
    place, store = threading.local(), HashStore()
    monkeypatch.setattr(
        external_launcher, "place_ranks", lambda parallel: replace(parallel, rank=place.rank)
    )
    monkeypatch.setattr(
        external_launcher,
        "_connections_of",
        lambda parallel: GlooConnections(parallel, store, "127.0.0.1"),
    )
    folder, own = checkpoint("llama"), {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 16}
    found: dict[int, dict[str, Any]] = {}

    def run(rank: int) -> None:
        place.rank = rank
        launched = {"distributed_executor_backend": "external_launcher", size: 2}
        with LLM(str(folder), **OPTIONS, **own, **launched) as llm:
            found[rank] = {**values(llm), **planted_failures(llm, rank)}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    with engine(folder, **OPTIONS) as llm:
        expected = values(llm)
    for thread in threads:
        thread.join(60)
    check_values(found[0], found[1])
    if size == "pipeline_parallel_size":
        check_values(found[0], expected)
    else:
        for ours, whole in zip(found[0]["rows"], expected["rows"], strict=True):
            assert relative_error(ours, whole) < 1e-5
    check_failures(found[0])
    check_failures(found[1])


def check_failures(found: dict[str, Any]) -> None:
    assert "this one cannot be sent" in found["a worker"]
    assert "planted" in found["rank 0"]
    assert "planted" in found["rank 1"]
    assert found["same"]
    assert "make different calls with other requests" in found["other prompts"]


@pytest.mark.parametrize(
    ("family", "size", "more"),
    [
        at_night("llama", "pipeline_parallel_size", {}),
        at_night("llama", "tensor_parallel_size", {}),
        at_night("llama", "tensor_parallel_size", {"enable_sequence_parallel": True}),
        at_night("mixtral", "tensor_parallel_size", {}),
    ],
)
def test_each_process_gets_the_bits_of_mp(
    checkpoint: Checkpoint, tmp_path: Path, family: str, size: str, more: dict[str, bool]
) -> None:
    """Stages, and ranks that share tokens, change no bit."""
    folder, calls = checkpoint(family), ("values", "failures")
    same = {} if size == "pipeline_parallel_size" else {size: 2}
    with processes(folder, tmp_path / "results", {size: 2, **more}, calls, 2) as started:
        with engine(folder, **OPTIONS, **same) as llm:
            expected = values(llm)
        assert [process.wait(120) for process in started] == [0, 0]
    for rank in range(2):
        found = load(tmp_path, rank)
        check_values(found, expected)
        check_failures(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_initialised", [False, True])
def test_torchrun_with_two_engines_of_two(
    checkpoint: Checkpoint, tmp_path: Path, *, is_initialised: bool
) -> None:
    options = json.dumps({**OPTIONS, "tensor_parallel_size": 2})
    calls = [*(["init"] if is_initialised else []), "values", "ranks", "sum"]
    launcher = ["torch.distributed.run", "--nproc-per-node", "4", "--master-port"]
    script = ["-m", "tests.engine.external_process", checkpoint("llama"), tmp_path / "results"]
    command = [sys.executable, "-m", *launcher, get_open_port(), *script, options, *calls]
    subprocess.run([str(one) for one in command], check=True, timeout=240)
    with engine(checkpoint("llama"), **OPTIONS, tensor_parallel_size=2) as llm:
        expected = values(llm)
    for rank in range(4):
        found = load(tmp_path, rank)
        check_values(found, expected)
        assert found["ranks"] == [0, 1]
        assert found["sum"] == 4  # the trainer's group works beside


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["end_first", "hang_first"])
def test_a_process_that_does_not_come(checkpoint: Checkpoint, tmp_path: Path, call: str) -> None:
    options = {"tensor_parallel_size": 2, "distributed_timeout_seconds": 5}
    calls = (call, "extract")
    with processes(checkpoint("llama"), tmp_path / "results", options, calls, 2) as started:
        assert started[0].wait(120) == 0
        if call == "end_first":
            assert started[1].wait() == -signal.SIGKILL
    found = load(tmp_path, 0)
    assert "engine_dead" in found["failure"]
    assert "not come for 5 s (distributed_timeout_seconds)" in found["failure"]
    assert found["seconds"] < 12


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4 .* need 4 processes.* there are 2"),
        (
            [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "max_num_seqs": 7}],
            "max_num_seqs is '256' in rank 0, '7' in rank 1",
        ),
    ],
)
def test_processes_that_do_not_fit(
    checkpoint: Checkpoint, tmp_path: Path, options: Any, message: str
) -> None:
    for found in results_of(checkpoint("llama"), tmp_path, options, ("extract",)):
        assert re.search(message, found["error"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "variable WORLD_SIZE is ''; start .* with torchrun"),
        ({"data_parallel_size": 2}, "with data_parallel_size=2: start more processes"),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, "with async_scheduling"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "with enable_lora"),
    ],
)
def test_what_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, options: Options, message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options |= {"distributed_executor_backend": "external_launcher", **OPTIONS}
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **options)


def test_a_rank_beyond_the_processes(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    place = {"RANK": 5, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    options = {"distributed_executor_backend": "external_launcher", **OPTIONS}
    with pytest.raises(ValueError, match="RANK=5 with WORLD_SIZE=2: ranks count from 0"):
        LLM(str(checkpoint("llama")), **options, tensor_parallel_size=2)


def test_a_port_that_is_taken(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in (place | {"MASTER_PORT": other.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        message = r"do not meet at MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+: .*(in use|EADDRINUSE)"
        with pytest.raises(ValueError, match=message):
            LLM(
                str(checkpoint("llama")),
                **OPTIONS,
                tensor_parallel_size=2,
                distributed_executor_backend="external_launcher",
            )
    assert not torch.distributed.is_initialized()


def test_servers_start_their_own_ranks(checkpoint: Checkpoint) -> None:
    args = AsyncEngineArgs(
        str(checkpoint("llama")), distributed_executor_backend="external_launcher"
    )
    with pytest.raises(ValueError, match="a server and AsyncLLM start their ranks themselves"):
        AsyncLLM.from_engine_args(args)
