"""An engine over two nodes, here both on this machine: values, ends, and what does not fit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.engine import rank_functions
from tests.engine.external_process import check_values, values
from tests.engine.harness import core_of, engine
from tests.engine.test_ranks import OPTIONS, PROMPTS, rank_processes, wait_until
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.hidden_states import HiddenStatesError
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.node_process import run_node

Checkpoint = Callable[..., Path]


@contextmanager
def node(
    checkpoint: Path, log: Path, options: dict[str, Any], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the second node's command; it is killed at the end."""
    given = {"nnodes": 2, "node_rank": 1, **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    program = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", str(checkpoint), "--headless", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | (environment or {})
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def sizes(size: str = "tensor_parallel_size") -> dict[str, Any]:
    return {size: 2, "master_port": get_open_port()}


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(30)


@pytest.mark.parametrize(
    "size",
    [
        "pipeline_parallel_size",
        at_night("tensor_parallel_size"),
        at_night("prefill_context_parallel_size"),
    ],
)
def test_two_nodes_have_the_bits_of_one(checkpoint: Checkpoint, size: str) -> None:
    """They go on after a failed step. The other node's process is a thread of this one."""
    folder, options, others = checkpoint("llama"), sizes(size), rank_processes()
    args = AsyncEngineArgs(str(folder), nnodes=2, node_rank=1, **options)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(run_node, args.create_engine_config())
        with engine(folder, **OPTIONS, **({} if "pipe" in size else {size: 2})) as llm:
            expected = values(llm)
        with LLM(str(folder), **OPTIONS, nnodes=2, **options) as llm:
            check_values(values(llm), expected)
            before = rows_of_all(llm)
            for failing_rank in range(2):
                llm.collective_rpc(rank_functions.fail_in_next_pass, args=(failing_rank,))
                (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
                assert "planted" in str(failed)
            assert torch.equal(before, rows_of_all(llm))
        assert status.result(30) == 0
    assert rank_processes() == others


def rows_of_all(llm: LLM) -> torch.Tensor:
    return torch.cat([one.hidden_states for one in llm.extract(PROMPTS, layers=[4])])


@pytest.mark.exhaustive
def test_a_killed_node(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, options, others = checkpoint("llama"), sizes(), rank_processes()
    with node(folder, tmp_path / "log", options) as process:
        llm = LLM(str(folder), **OPTIONS, nnodes=2, **options)
        rows_of_all(llm)
        process.kill()
        wait_until(lambda: core_of(llm).executor.dead_because is not None)
        with pytest.raises((EngineDeadError, HiddenStatesError), match=r"node 1 \(.+\) has gone"):
            rows_of_all(llm)
        llm.shutdown()
    wait_until(lambda: rank_processes() == others)


@pytest.mark.exhaustive
def test_a_killed_rank_of_another_node(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, options = checkpoint("llama"), sizes()
    with node(folder, tmp_path / "log", options) as process:
        llm = LLM(str(folder), **OPTIONS, nnodes=2, **options)
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
        (pid,) = rank_processes(process.pid)
        os.kill(pid, signal.SIGKILL)
        died = r"rank 1 ended with status -9 on node 1 \("
        with pytest.raises((EngineDeadError, HiddenStatesError), match=died):
            list(llm.extract(PROMPTS, layers=[4]))
        llm.shutdown()
        assert ended(process) == 1


@pytest.mark.exhaustive
def test_a_rank_that_hangs_on_another_node(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, options = checkpoint("llama"), sizes() | {"distributed_timeout_seconds": 15.0}
    with node(folder, log := tmp_path / "log", options) as process:
        wait_until(lambda: "waiting for the engine" in log.read_text(), 60.0)
        llm = LLM(str(folder), **OPTIONS, nnodes=2, **options)
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
        (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
        assert "rank 1 has not answered for 15 s (distributed_timeout_seconds)" in str(failed)
        llm.shutdown()
        assert ended(process) == 1
    assert "rank_functions.py" in (tmp_path / "log").read_text()  # the stacks


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_node_ends_with_the_engine(
    checkpoint: Checkpoint, tmp_path: Path, *, is_killed: bool
) -> None:
    """The engine is in a process of its own, as behind a server."""

    async def run() -> None:
        args = AsyncEngineArgs(str(folder), **OPTIONS, nnodes=2, **options)
        llm = AsyncLLM.from_engine_args(args)
        (sample,) = [one async for one in llm.extract([PROMPTS[0]], layers=[4])]
        assert sample.hidden_states.shape == (61, 1, 72)
        if is_killed:
            (core,) = cores()
            core.kill()
            assert await asyncio.to_thread(ended, process) == 1
        await llm.shutdown()
        assert await asyncio.to_thread(ended, process) == int(is_killed)

    def cores() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [one for one in children if "vllm.v1.engine.core_process" in one.cmdline()]

    folder, options, others = checkpoint("llama"), sizes(), rank_processes()
    with node(folder, tmp_path / "log", options) as process:
        asyncio.run(run())
        wait_until(lambda: rank_processes() == others)


@pytest.mark.exhaustive
def test_nodes_that_differ(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, options = checkpoint("llama"), sizes()
    other = make_checkpoint(tmp_path / "other", "llama", seed=77)
    message = r"nodes differ: weights is .* in node 0, .* in node 1 \(.*tensor_parallel_size is"
    with node(other, tmp_path / "log", options | {"tensor_parallel_size": 4}) as process:
        with pytest.raises(ValueError, match=message):
            LLM(str(folder), **OPTIONS, nnodes=2, **options)
        assert ended(process) == 1
    assert re.search(message, (tmp_path / "log").read_text())


@pytest.mark.exhaustive
def test_a_key_that_differs(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = checkpoint("llama"), sizes() | {"distributed_timeout_seconds": 8.0}
    monkeypatch.setenv("VLLM_NODE_KEY", "one")
    keys = {"VLLM_NODE_KEY": "two"}
    with node(folder, log := tmp_path / "log", options, keys) as process:
        wait_until(lambda: "waiting for the engine" in log.read_text(), 60.0)
        with pytest.raises(ValueError, match=r"node 1 has not come to 127.0.0.1:\d+ for 8 s"):
            LLM(str(folder), **OPTIONS, nnodes=2, **options)
        assert ended(process) == 1
    assert "does not have the same VLLM_NODE_KEY" in (tmp_path / "log").read_text()


@pytest.mark.exhaustive
def test_a_node_without_an_engine(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = sizes() | {"distributed_timeout_seconds": 1.0}
    with node(checkpoint("llama"), tmp_path / "log", options) as process:
        assert ended(process) == 1
    assert "no engine has come to master_addr, master_port" in (tmp_path / "log").read_text()


@pytest.mark.exhaustive
def test_two_engines_with_nodes_of_their_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each engine has two ranks on two nodes, and a front end; both have the bits of one node."""
    folder, others = checkpoint("llama"), rank_processes()
    with engine(folder, **OPTIONS, tensor_parallel_size=2) as llm:
        expected = rows_of_all(llm)
    with ExitStack() as stack:
        engines = []
        for number in range(2):
            options = sizes() | {"data_parallel_size": 2, "data_parallel_rank": number}
            stack.enter_context(node(folder, tmp_path / f"log{number}", options))
            args = AsyncEngineArgs(str(folder), **OPTIONS, nnodes=2, **options)
            engines.append(AsyncLLM.from_engine_args(args))

        async def rows(llm: AsyncLLM) -> torch.Tensor:
            found = [one async for one in llm.extract(PROMPTS, layers=[4])]
            await llm.shutdown()
            return torch.cat([one.hidden_states for one in found])

        async def run() -> list[torch.Tensor]:
            return await asyncio.gather(*map(rows, engines))

        for found in asyncio.run(run()):
            assert torch.equal(found, expected)
    wait_until(lambda: rank_processes() == others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "nnodes=2: tensor_parallel_size=1 times .* not a multiple of it"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank=2: .* below nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "node_rank=1: .* --headless"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "nnodes=2: data_parallel_size=2: nodes share one engine; start a server for each",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "'uni' has one rank",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "8.8.8.8"},
            "master_addr='8.8.8.8' is the public address",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"},
            "master_addr='0.0.0.0' stands for all addresses",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_timeout_seconds": 0.2},
            r"node 1 has not come to 127.0.0.1:29501 for 0.2 s",
        ),
    ],
)
def test_what_is_refused(checkpoint: Checkpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **{**OPTIONS, **options})


def test_a_port_that_is_taken(checkpoint: Checkpoint) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = {**OPTIONS, "tensor_parallel_size": 2, "master_port": port}
        with pytest.raises(ValueError, match=f"master_port={port} is in use at 127.0.0.1"):
            LLM(str(checkpoint("llama")), nnodes=2, **options)
