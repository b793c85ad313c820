"""Engines of several machines behind one front end, here all on this machine; and servers that
are each one of several engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.engine import rank_functions
from tests.engine.harness import engine, extraction_config, greedy
from tests.engine.test_data_parallel import OPTIONS, PROMPTS, all_of, rows, tokens
from tests.engine.test_nodes import ended, node
from tests.engine.test_ranks import wait_until
from tests.entrypoints.serve_process import serve
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.config import ParallelConfig
from vllm.exceptions import FailureKind
from vllm.hidden_states import FailedSample
from vllm.utils import stop_watch
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine import core_client, node_process
from vllm.v1.engine.core_group import CoreGroup
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.node_process import run_node
from vllm.v1.executor.node_links import MeetingPlace, authenticate, connection_over, receive
from vllm.v1.executor.node_meeting import NodeMeeting

Checkpoint = Callable[..., Path]
CORE = "vllm.v1.engine.core_process"


def sizes(size: int = 2, local: int = 1) -> dict[str, Any]:
    return {
        "data_parallel_size": size,
        "data_parallel_size_local": local,
        "data_parallel_rpc_port": get_open_port(),
    }


def cores(parent: int | None = None) -> set[int]:
    children = psutil.Process(parent).children(recursive=True)
    return {one.pid for one in children if CORE in one.cmdline()}


@asynccontextmanager
async def front_end(checkpoint: Path, options: dict[str, Any]) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint), **{**OPTIONS, **options}))
    try:
        await llm.start()
        yield llm
    finally:
        await llm.shutdown()


@contextmanager
def node_thread(checkpoint: Path, options: dict[str, Any]) -> Iterator[Future[int]]:
    """Run the process of a node as a thread of this one."""
    given = {**options, "data_parallel_start_rank": 1}
    with ThreadPoolExecutor(1) as pool:
        config = AsyncEngineArgs(str(checkpoint), **given).create_engine_config()
        yield pool.submit(run_node, config)


async def until_busy(llm: AsyncLLM, *numbers: int) -> None:
    group = llm._client
    assert isinstance(group, CoreGroup)
    async with asyncio.timeout(60):
        while not all(group._loads[number] for number in numbers):
            await asyncio.sleep(0.01)


def expected_rows(checkpoint: Path) -> list[torch.Tensor]:
    with engine(checkpoint, **OPTIONS) as llm:
        return [one.hidden_states for one in llm.extract(PROMPTS, layers=[0, 3, "norm"])]


def test_an_engine_of_another_node(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, calls, and what happens when it ends. The node's process is a thread of this one."""
    monkeypatch.setattr(stop_watch, "STOPPED_SECONDS", 0.2)
    for module in (core_client, node_process):
        monkeypatch.setattr(module, "STOP_POLL_SECONDS", 0.05)

    async def run() -> None:
        async with front_end(folder, options) as llm:
            assert all(map(torch.equal, await rows(llm), expected))
            here, there = await llm.collective_rpc(rank_functions.pid)
            assert here == llm.core_pid
            assert cores() == {here, there}
            assert await llm.collective_rpc(rank_functions.has_computed) == [True, True]
            alone = await tokens(llm, 0)
            assert await asyncio.gather(*(tokens(llm, 0) for _ in range(4))) == [alone] * 4
            await llm.collective_rpc(rank_functions.hide_files_from, args=(there, str(other)))
            with pytest.raises(ValueError, match="other"):
                await llm.update_weights(str(other))
            assert all(map(torch.equal, await rows(llm), expected)), "no engine has taken them"
            os.kill(there, signal.SIGSTOP)  # its requests stay under way
            found = llm.extract(PROMPTS, layers=[0, 3, "norm"], on_error="yield")
            task = asyncio.create_task(all_of(found))
            await until_busy(llm, 1)
            await asyncio.to_thread(wait_until, lambda: llm.is_stopped)
            os.kill(there, signal.SIGKILL)
            results = await task
            failed = [one for one in results if isinstance(one, FailedSample)]
            assert 0 < len(failed) < len(PROMPTS)
            for one in failed:
                assert one.failure.kind is FailureKind.ENGINE_DEAD
                assert "engine 1 of 2: the process of engine 1 ended with status -9" in one.reason
            await llm.check_health()
            await asyncio.to_thread(wait_until, lambda: not llm.is_stopped)
            assert all(map(torch.equal, await rows(llm), expected))
            assert await llm.collective_rpc(rank_functions.pid) == [here]

    folder, options = checkpoint("llama"), sizes()
    other = make_checkpoint(tmp_path / "other", "llama", seed=77)
    expected = expected_rows(folder)
    with node_thread(folder, options) as status:
        asyncio.run(run())
        assert status.result(30) == 0
    assert not cores()


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["node", "in order"])
def test_ends(checkpoint: Checkpoint, tmp_path: Path, way: str) -> None:
    """Two nodes with two engines each and a front end without; one of the parts is killed."""

    async def run(first: Any, second: Any) -> None:
        async with front_end(folder, options) as llm:
            with pytest.raises(ValueError, match="data_parallel_size_local=0: no engine core"):
                _ = llm.core_pid
            assert all(map(torch.equal, await rows(llm), expected))
            pids = await llm.collective_rpc(rank_functions.pid)
            assert {*pids[:2]} == cores(first.pid)
            assert {*pids[2:]} == cores(second.pid)
            if way == "node":
                for pid in pids:  # none ends a request, so all get some
                    os.kill(pid, signal.SIGSTOP)
                found = llm.extract(PROMPTS, layers=[3], on_error="yield")
                task = asyncio.create_task(all_of(found))
                await until_busy(llm, *range(4))
                for pid in pids[:2]:
                    os.kill(pid, signal.SIGCONT)
                second.kill()
                failed = [one for one in await task if isinstance(one, FailedSample)]
                for pid in pids[2:]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)  # they end with their node
                wait_until(lambda: not any(map(psutil.pid_exists, pids[2:])))
                gone = r"engine [23] of 4: the node of engines 2, 3 \(.+\) has gone"
                assert failed
                assert all(re.search(gone, one.reason) for one in failed)
                assert all(map(torch.equal, await rows(llm), expected))
                assert await llm.collective_rpc(rank_functions.pid) == pids[:2]
                first.kill()
                await asyncio.to_thread(wait_until, lambda: llm.errored)
                with pytest.raises(EngineDeadError):
                    await rows(llm)

    folder, options, expected = checkpoint("llama"), sizes(4, 0), expected_rows(checkpoint("llama"))
    given = {**options, "data_parallel_size_local": 2, "nnodes": 1, "node_rank": 0}
    with (
        node(folder, tmp_path / "first", given) as first,
        node(folder, tmp_path / "second", {**given, "data_parallel_start_rank": 2}) as second,
    ):
        asyncio.run(run(first, second))
        if way == "in order":
            assert (ended(first), ended(second)) == (0, 0)
    assert not cores()


def other_node(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "nnodes": 1, "node_rank": 0, "data_parallel_start_rank": 1}


async def starts(folder: Path, options: dict[str, Any]) -> None:
    async with front_end(folder, options):
        pass


@pytest.mark.exhaustive
def test_nodes_that_do_not_fit(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = checkpoint("llama"), tmp_path / "log"
    other = make_checkpoint(tmp_path / "other", "llama", seed=77)
    options = sizes()
    message = r"data_parallel_size=2: nodes differ: weights is .* in the node of engine 1 \("
    with node(other, log, other_node(options)) as process:
        with pytest.raises(ValueError, match=message):
            asyncio.run(starts(folder, options))
        assert ended(process) == 1
    assert re.search(message, log.read_text())
    options = sizes() | {"distributed_timeout_seconds": 8.0}
    given = {**other_node(options), "data_parallel_start_rank": 0}
    with node(folder, log, given) as process:  # its engine is on the front end's machine
        wait_until(lambda: "waiting for the engine" in log.read_text(), 60.0)
        with pytest.raises(ValueError, match=r"engine 1 has not come to 127.0.0.1:\d+ for 8 s"):
            asyncio.run(starts(folder, options))
        assert ended(process) == 1
    assert "engine 0: not awaited, or there already" in log.read_text()
    monkeypatch.setenv("VLLM_NODE_KEY", "one")
    with node(folder, log, other_node(options), {"VLLM_NODE_KEY": "two"}) as process:
        wait_until(lambda: "waiting for the engine" in log.read_text(), 60.0)
        with pytest.raises(ValueError, match=r"engine 1 has not come to 127.0.0.1:\d+ for 8 s"):
            asyncio.run(starts(folder, options))
        assert ended(process) == 1
    assert "does not have the same VLLM_NODE_KEY" in log.read_text()
    options["distributed_timeout_seconds"] = 1.0
    with node(folder, log, other_node(options)) as process:
        assert ended(process) == 1
    assert "no engine has come to data_parallel_address, data_parallel_rpc_po" in log.read_text()
    assert not cores()


@pytest.mark.exhaustive
def test_a_server_that_is_killed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its nodes end, too. Both of its engines are on another node."""
    folder, options = checkpoint("llama"), sizes(2, 0)
    given = {**options, "data_parallel_size_local": 2, "nnodes": 1, "node_rank": 0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with (
        node(folder, tmp_path / "log", given) as process,
        serve(folder, None, *flags) as server,
        server.client() as client,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(cores(process.pid)) == 2
        assert not cores(server.process.pid)
        server.signal(signal.SIGKILL)
        server.wait()
        assert ended(process) == 1
    assert not cores()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "num_engines"),
    [
        (["--data-parallel-rank=2"], 1),
        (["-dpl=2", "--data-parallel-start-rank=2", "--data-parallel-hybrid-lb"], 2),
    ],
)
def test_servers_of_some_engines(
    checkpoint: Checkpoint, flags: list[str], num_engines: int
) -> None:
    """Nobody waits for the others of the four."""
    with (
        serve(checkpoint("llama"), None, "-dp=4", *flags) as server,
        server.client() as client,
    ):
        assert len(cores(server.process.pid)) == num_engines
        body = {"prompt": [[5, 6, 7]] * 3, "max_tokens": 3, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len({choice["text"] for choice in answer.json()["choices"]}) == 1
        metrics = client.get("/metrics").text
        assert re.search(r'^vllm:prompt_tokens_total{engine="2",.*} 9.0$', metrics, re.MULTILINE)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.exhaustive
def test_a_node_whose_engine_cannot_start(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, options = checkpoint("llama"), sizes()
    # The front end may have failed before the node comes, which then waits for it.
    limit = {"distributed_timeout_seconds": 15}
    with node(folder, tmp_path / "log", {**other_node(options), **limit}) as process:
        with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
            asyncio.run(starts(folder, {**options, "kv_cache_memory_bytes": 2**12}))
        assert ended(process) == 1
    assert not cores()


@pytest.mark.exhaustive
def test_files_of_an_engine_of_another_node(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """They are where the front end looks for them, and nothing else stays in the folder."""
    folder, storage, options = checkpoint("llama"), tmp_path / "out", sizes()
    extraction = extraction_config([0, 3, "norm"], storage)

    async def run() -> None:
        async with front_end(folder, options | extraction) as llm:
            paths = []
            for number in range(2):

                async def ask(number: int = number) -> str:
                    name = f"request {number}"
                    outputs = [o async for o in llm.generate(PROMPTS[number], greedy(1), name)]
                    return str(outputs[-1].kv_transfer_params["hidden_states_path"])

                paths.append(ask())
            found = [load_file(path)["hidden_states"] for path in await asyncio.gather(*paths)]
            assert await llm.collective_rpc(rank_functions.has_computed) == [True, True]
            assert all(map(torch.equal, found, expected))

    expected = expected_rows(folder)[:2]
    with node_thread(folder, options) as status:
        asyncio.run(run())
        assert status.result(30) == 0
    assert len(list(storage.glob("*.safetensors"))) == 2
    assert not list(storage.glob(".*"))


def test_a_port_that_is_taken(checkpoint: Checkpoint) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = {**sizes(), "data_parallel_rpc_port": port}
        with pytest.raises(ValueError, match=f"data_parallel_rpc_port={port} is in use at 127.0"):
            AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint("llama")), **options))
    assert not cores()


def test_who_comes_to_a_meeting() -> None:
    """Others than a node, a node twice, and one that is late are refused, and nobody waits."""
    place = MeetingPlace("127.0.0.1", get_open_port(), "127.0.0.1", ("address", "port"))
    meeting = NodeMeeting(place, "data_parallel_size=2", "engine", [1], {"a": "1"}, 30.0)

    def connect() -> Connection:
        return connection_over(socket.create_connection((place.host, place.port)))

    def say(connection: Connection, message: Any) -> None:
        authenticate(connection, is_engine=False)
        connection.send_bytes(json.dumps(message).encode())

    hello = {"members": [1], "noun": "engine", "host": "there", "terms": {"a": "1"}}
    for message in ("nothing", {"members": "x"}, {**hello, "terms": 3}):
        stranger = connect()
        say(stranger, message)
        with pytest.raises(EOFError):
            receive(stranger)
    assert not meeting.is_complete()
    late, first, second = connect(), connect(), connect()
    say(first, hello)
    meeting.wait()
    say(second, hello)
    refusal = receive(second)["error"]
    assert refusal == "data_parallel_size=2: engine 1: not awaited, or there already"
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(meeting.end, 0.0)
        assert receive(first) == {"end": 0.0}
        first.close()
        ending.result(30)
    assert meeting.links[1].ending(1) == "the node of engine 1 (there) has gone, with engine 1"
    say(late, hello)
    assert receive(late) == {"error": "data_parallel_size=2: node 0 has ended"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size_local": 0}, "headless with data_parallel_size_local=0: .* nothing"),
        ({"data_parallel_rank": 1}, "headless with data_parallel_external_lb: each of its"),
        (
            {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1},
            "headless with data_parallel_hybrid_lb: each of its servers has a front end",
        ),
        ({"data_parallel_address": "8.8.8.8"}, "data_parallel_address='8.8.8.8' is the public"),
    ],
)
def test_nodes_that_cannot_be(
    checkpoint: Checkpoint, options: dict[str, Any], message: str
) -> None:
    args = AsyncEngineArgs(str(checkpoint("llama")), data_parallel_size=2, **options)
    with pytest.raises(ValueError, match=message):
        run_node(args.create_engine_config())


def test_programs_and_nodes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    config = AsyncEngineArgs(str(checkpoint("llama"))).create_engine_config()
    with pytest.raises(ValueError, match="headless with VLLM_DP_SIZE, which is for programs"):
        run_node(config)


def test_places_of_engines() -> None:
    """The shares of a machine's cores count its own engines alone."""
    for options, here, served, place in (
        ({}, range(4), range(4), (3, 4)),
        ({"data_parallel_size_local": 1}, range(1), range(4), None),
        ({"data_parallel_size_local": 0}, range(0), range(4), None),
        ({"external_rank": 3}, range(3, 4), range(3, 4), (0, 1)),
        (
            {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}
            | {"data_parallel_start_rank": 2, "data_parallel_rank": 3},
            range(2, 4),
            range(2, 4),
            (1, 2),
        ),
    ):
        given: dict[str, Any] = {"data_parallel_rank": 3, **options}
        parallel = ParallelConfig(data_parallel_size=4, **given)
        assert (parallel.engines_here, parallel.engines_served) == (here, served)
        assert place is None or parallel.place_on_machine == place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size_local": 3}, "size_local=3: there are data_parallel_size=2 engines"),
        ({"data_parallel_start_rank": 2}, "start_rank=2, .*: there are data_parallel_size=2"),
        ({"data_parallel_start_rank": 1}, "start_rank=1, .*: name the number of engines of this"),
        ({"data_parallel_rank": 2}, "data_parallel_rank=2: has to be below data_parallel_size=2"),
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb needs data_parallel_rank"),
        ({"data_parallel_hybrid_lb": True}, "hybrid_lb needs data_parallel_size_local"),
        (
            {"data_parallel_rank": 1, "data_parallel_start_rank": 1},
            "data_parallel_start_rank=1, .* with data_parallel_rank, which is one engine",
        ),
        (
            {"data_parallel_rank": 1, "data_parallel_hybrid_lb": True},
            "data_parallel_external_lb and data_parallel_hybrid_lb: use one of them",
        ),
        (
            {"data_parallel_start_rank": 1, "data_parallel_size_local": 1},
            "data_parallel_start_rank=1: engine 0 and the front end are on another machine",
        ),
        (
            {"data_parallel_size_local": 1, "data_parallel_address": "8.8.8.8"},
            "data_parallel_address='8.8.8.8' is the public address",
        ),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend='ray' is not supported yet"),
    ],
)
def test_what_is_refused(checkpoint: Checkpoint, options: dict[str, Any], message: str) -> None:
    args = AsyncEngineArgs(str(checkpoint("llama")), data_parallel_size=2, **options)
    with pytest.raises(ValueError, match=message):
        AsyncLLM.from_engine_args(args)
    with pytest.raises(ValueError, match="data_parallel"):
        LLM(str(checkpoint("llama")), data_parallel_size=2, **options)
