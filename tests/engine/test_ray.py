"""Ranks on a Ray cluster, which has two nodes on this machine. The same without Ray, by day:
``test_ray_ranks.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.engine import rank_functions
from tests.engine.external_process import check_values, values
from tests.engine.harness import core_of, engine
from tests.engine.ray_caller import PAIR, RAY, Caller, rows, served_rows
from tests.engine.test_ranks import OPTIONS, PROMPTS, rank_processes, wait_until
from tests.entrypoints.serve_process import serve
from tests.ray_clusters import check_nothing_is_left, ray_cluster
from vllm import LLM
from vllm.hidden_states import HiddenStatesError
from vllm.v1.engine.exceptions import EngineDeadError

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = pytest.mark.exhaustive

Checkpoint = Callable[..., Path]
DEAD = (EngineDeadError, HiddenStatesError)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each."""
    with ray_cluster([1, 1]) as made:
        yield made


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_two_nodes_have_the_bits_of_one(
    checkpoint: Checkpoint, tensor: int, stages: int
) -> None:
    """They go on after a failed step."""
    folder = checkpoint("llama")
    with engine(folder, **OPTIONS, tensor_parallel_size=tensor) as llm:
        expected = values(llm)
    num_ranks = tensor * stages
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    with ray_cluster([num_ranks // 2] * 2):
        with LLM(str(folder), **OPTIONS, **RAY, **sizes) as llm:
            check_values(values(llm), expected)
            before = rows(llm)
            for failing_rank in range(num_ranks):
                llm.collective_rpc(rank_functions.fail_in_next_pass, args=(failing_rank,))
                (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
                assert "planted" in str(failed)
            assert torch.equal(before, rows(llm))
            assert len(set(llm.collective_rpc(rank_functions.pid))) == num_ranks
        check_nothing_is_left()


def test_a_killed_actor(checkpoint: Checkpoint, cluster: Any) -> None:
    llm = LLM(str(checkpoint("llama")), **PAIR)
    _, pid = llm.collective_rpc(rank_functions.pid)
    llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
    psutil.Process(pid).parent().kill()  # type: ignore[union-attr]
    with pytest.raises(DEAD, match="the Ray actor of rank 1 has ended: The actor died"):
        rows(llm)
    wait_until(lambda: not psutil.pid_exists(pid))
    llm.shutdown()
    check_nothing_is_left()


def test_a_rank_that_hangs(checkpoint: Checkpoint, cluster: Any) -> None:
    llm = LLM(str(checkpoint("llama")), **PAIR, distributed_timeout_seconds=15.0)
    llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
    (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
    assert "rank 1 has not answered for 15 s (distributed_timeout_seconds)" in str(failed)
    llm.shutdown()
    check_nothing_is_left()


def test_a_node_that_leaves(checkpoint: Checkpoint, cluster: Any) -> None:
    llm = LLM(str(checkpoint("llama")), **PAIR)
    rows(llm)
    cluster.remove_node(cluster.extra_nodes[0], allow_graceful=False)
    wait_until(lambda: core_of(llm).executor.dead_because is not None, 60.0)
    with pytest.raises(DEAD, match="rank 1"):
        rows(llm)
    llm.shutdown()
    check_nothing_is_left()


def test_no_room(checkpoint: Checkpoint, cluster: Any) -> None:
    message = (
        r"no room in the Ray cluster for 3 ranks of 1 CPUs .*, for 2 s \(distributed_timeout_"
        r"seconds\); the nodes' CPUs: [\d.]+ with 1, [\d.]+ with 1; 2 are free"
    )
    options = {"pipeline_parallel_size": 3, "distributed_timeout_seconds": 2.0}
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **OPTIONS, **RAY, **options)
    check_nothing_is_left()


def test_ranks_that_differ(
    checkpoint: Checkpoint, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instruction set stands for another machine."""
    monkeypatch.setattr("vllm.v1.executor.ray_ranks._environment", lambda: {"VLLM_CPU_ISA": "avx2"})
    with pytest.raises(ValueError, match="the ranks of one engine differ: kernels is"):
        LLM(str(checkpoint("llama")), **PAIR)
    check_nothing_is_left()


def test_the_callers_placement_group(checkpoint: Checkpoint, cluster: Any) -> None:
    """All CPUs are in it, so nothing else has room."""
    folder = checkpoint("llama")
    with engine(folder, **OPTIONS, tensor_parallel_size=2) as llm:
        expected = rows(llm)
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
    assert group.wait(20)
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 1)
    caller = ray.remote(Caller).options(num_cpus=0, scheduling_strategy=place).remote()
    found, pids = ray.get(caller.rows_of_engine.remote(str(folder)))
    assert torch.equal(found, expected)
    assert not any(map(psutil.pid_exists, pids[1:]))
    found = ray.get(caller.rows_of_engine_in_a_process.remote(str(folder)))
    assert torch.equal(found, expected)
    ray.util.remove_placement_group(group)
    check_nothing_is_left()


def test_an_engine_in_a_process_uses_the_same_cluster(checkpoint: Checkpoint, cluster: Any) -> None:
    folder = checkpoint("llama")
    with engine(folder, **OPTIONS, tensor_parallel_size=2) as llm:
        expected = rows(llm)
    assert torch.equal(asyncio.run(served_rows(str(folder))), expected)
    check_nothing_is_left()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server(
    checkpoint: Checkpoint,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_killed: bool,
) -> None:
    """Nothing is left of it in the cluster, however its engine ends."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    others = rank_processes()
    flags = ("-tp", "2", "--distributed-executor-backend", "ray")
    folder = checkpoint("llama")
    with serve(folder, None, *flags) as server:
        body = {"model": str(folder), "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        reply = server.client().post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 3
        if is_killed:
            server.core().kill()
        else:
            server.signal(signal.SIGTERM)
        server.wait()
    check_nothing_is_left()
    wait_until(lambda: rank_processes() == others)


def test_a_program_that_forgets_to_shut_down(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It starts a cluster of its own, which ends with it."""
    program = tmp_path / "program.py"
    program.write_text(
        "from vllm import LLM\n"
        f"llm = LLM({str(checkpoint('llama'))!r}, **{PAIR!r})\n"
        "print(len(list(llm.extract(['hello'], layers=[4]))), 'sample')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "1 sample" in done.stdout
