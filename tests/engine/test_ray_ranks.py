"""Ranks in actors of a double of Ray, and what is refused before Ray is asked.

The same with Ray itself: ``test_ray.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import rank_functions
from tests.engine.external_process import check_values, values
from tests.engine.harness import core_of, engine
from tests.engine.ray_double import HERE, Group, RayDouble
from tests.engine.test_ranks import OPTIONS, rank_processes, wait_until
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.utils import ray_cluster
from vllm.utils.ray_cluster import find_room, place_here, share_of_cpus
from vllm.v1.engine.exceptions import EngineDeadError

Checkpoint = Callable[..., Path]
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}


@pytest.fixture
def use_double(monkeypatch: pytest.MonkeyPatch) -> Callable[[RayDouble], RayDouble]:
    def use(double: RayDouble) -> RayDouble:
        monkeypatch.setattr(ray_cluster, "import_ray", lambda _: double)
        monkeypatch.setitem(sys.modules, "ray", double)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        return double

    return use


def test_stages_in_actors_have_the_bits_of_one_process(
    checkpoint: Checkpoint, use_double: Callable[[RayDouble], RayDouble]
) -> None:
    """The same engine then fails when a process ends, and leaves nothing."""
    folder, double, others = checkpoint("llama"), use_double(RayDouble([1, 2])), rank_processes()
    with engine(folder, **OPTIONS) as llm:
        expected = values(llm)
    with LLM(str(folder), **OPTIONS, pipeline_parallel_size=2, **RAY) as llm:
        check_values(values(llm), expected)
        assert double.addresses == [None]
        assert [(one.bundle, one.num_cpus) for one in double.actors] == [(1, 1)]
        assert [one.places for one in double.groups] == [[HERE, "node-1"]]
        (pid,) = rank_processes() - others
        assert llm.collective_rpc(rank_functions.pid) == [os.getpid(), pid]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: core_of(llm).executor.dead_because is not None)
        with pytest.raises(EngineDeadError, match="rank 0 ended with status -9 in its Ray actor"):
            values(llm)
    assert all(actor.is_killed for actor in double.actors)
    assert not double.groups
    assert rank_processes() == others


def test_no_room(checkpoint: Checkpoint, use_double: Callable[[RayDouble], RayDouble]) -> None:
    double = use_double(RayDouble([1, 0]))
    options = {"tensor_parallel_size": 2, "distributed_timeout_seconds": 0.01, **RAY}
    message = (
        r"distributed_executor_backend='ray': there was no room in the Ray cluster for 2 ranks of "
        r"1 CPUs .*, for 0.01 s \(distributed_timeout_seconds\); the nodes' CPUs: node-0 with 1, "
        "node-1 with 0; 1 are free"
    )
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **OPTIONS, **options)
    assert not double.groups
    assert not double.actors


def test_room_in_the_callers_group() -> None:
    """Bundles of a node follow each other, and those of this node come first."""
    bundles = [{"CPU": 2}, {"CPU": 4}, {"memory": 1}, {"CPU": 2}, {"CPU": 3}]
    group = Group(bundles, ["node-1", HERE, HERE, "node-2", "node-1"])
    room = find_room(RayDouble([8]), "here", 3, group, 1.0)
    assert room.bundles == [(1, HERE), (0, "node-1"), (4, "node-1")]
    assert (room.num_cpus, room.is_own) == (2, False)
    with pytest.raises(ValueError, match=r"5 ranks .* need one each with .*CPU"):
        find_room(RayDouble([8]), "here", 5, group, 1.0)
    away = Group([{"CPU": 1}] * 2, ["node-1", "node-2"])
    with pytest.raises(ValueError, match=r"no bundle of the placement group .* on this node"):
        find_room(RayDouble([8]), "here", 2, away, 1.0)


def test_room_for_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has to fit on this node."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cpus, num_cpus, nodes in (
        ([4, 4], 4, [HERE, "node-1"]),
        ([2, 8], 2, [HERE, "node-1"]),
        ([8, 1], 4, [HERE, HERE]),
    ):
        room = find_room(RayDouble(cpus), "here", 2, None, 1.0)
        assert (room.num_cpus, [node for _, node in room.bundles]) == (num_cpus, nodes)
        assert room.is_own


@pytest.mark.parametrize(
    ("cpus", "num_parts", "share"),
    [([8], 3, 2), ([4, 2], 3, 2), ([5, 5], 2, 5), ([1, 1], 3, 1), ([], 1, 1), ([0, 64], 4, 16)],
)
def test_shares_of_cpus(cpus: list[int], num_parts: int, share: int) -> None:
    assert share_of_cpus(cpus, num_parts) == share


def test_an_engine_elsewhere_gets_the_place(
    use_double: Callable[[RayDouble], RayDouble],
) -> None:
    group = Group([], [])
    double = use_double(RayDouble([1], group))
    assert place_here() is None
    double.init(None, log_to_driver=True)
    assert place_here() == ("127.0.0.1:1", group)


def test_addresses_without_a_cluster(
    checkpoint: Checkpoint,
    use_double: Callable[[RayDouble], RayDouble],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = use_double(RayDouble([2]))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
        for address, message in (
            ("ray://10.0.0.5:10001", "is that of a Ray client; run this on a node"),
            (closed, "no Ray cluster is at the address '127.0.0.1"),
            ("10.0.0.5:x", "no Ray cluster is at the address '10.0.0.5:x'"),
        ):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(ValueError, match=message):
                LLM(str(checkpoint("llama")), **OPTIONS, tensor_parallel_size=2, **RAY)
    assert not double.addresses


def test_without_ray(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="'ray' needs Ray: pip install ray"):
        LLM(str(checkpoint("llama")), **OPTIONS, tensor_parallel_size=2, **RAY)


def test_several_engines_are_refused(checkpoint: Checkpoint) -> None:
    async def start() -> None:
        sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
        await AsyncLLM.from_engine_args(
            AsyncEngineArgs(str(checkpoint("llama")), **OPTIONS, **sizes, **RAY)
        ).start()

    with pytest.raises(ValueError, match=r"data_parallel_size=2 with .*'ray' is not supported"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "distributed_executor_backend='ray' starts no nodes"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}},
            "'ray' with kv_connector='OffloadingConnector', which stores caches",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(checkpoint: Checkpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **OPTIONS, tensor_parallel_size=2, **RAY, **options)
