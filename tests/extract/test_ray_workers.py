"""Workers of ``vllm extract`` on a Ray cluster of two nodes, with engines of several ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extract.job_harness import digests, token_lists, write_token_ids
from tests.models.checkpoints import make_checkpoint
from tests.ray_clusters import check_nothing_is_left, ray_cluster
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions

RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", "llama")


def run(model: Path, output: Path, options: dict[str, Any], **engine: Any) -> dict[str, str]:
    """Return the digests of the files of a dataset of ten units."""
    data = output.parent / "data.jsonl"
    if not data.exists():
        write_token_ids(data, token_lists(1, 60, 40))
    given = {"input": [str(data)], "output": str(output), "layers": "0,3,last", **options}
    args = EngineArgs(str(model), kv_cache_memory_bytes=2**23, **engine)
    assert run_job(ExtractOptions(**given, shard_size_gib=1e-4), args) == 0
    return digests(output)


def kill_a_worker(output: Path, killed: list[int]) -> None:
    """Kill a worker's process when the first file is whole."""
    deadline = time.monotonic() + 60
    while not list(output.glob("*.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        if "_Actor" in " ".join(process.cmdline()) and not killed:
            killed.append(process.pid)
            process.kill()


@pytest.mark.exhaustive
def test_datasets_are_those_of_one_process(model: Path, tmp_path: Path) -> None:
    """Stages of two workers are on both nodes, and a worker dies with its ranks."""
    pytest.importorskip("ray", reason="Ray is not installed")
    expected = run(model, tmp_path / "alone", {})
    options, killed = {"distributed": "ray"}, list[int]()
    output = tmp_path / "killed"
    killer = threading.Thread(target=kill_a_worker, args=(output, killed))
    with ray_cluster([3, 1]):
        killer.start()
        sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
        assert run(model, output, options, **sizes, **RAY) == expected
        killer.join()
        assert killed
        check_nothing_is_left()


@pytest.mark.exhaustive
def test_workers_with_ranks_of_their_own_node(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    expected = run(model, tmp_path / "alone", {}, tensor_parallel_size=2)
    with ray_cluster([2]) as cluster:
        options = {"distributed": "ray", "ray_address": cluster.address}
        assert run(model, tmp_path / "mp", options, tensor_parallel_size=2) == expected
        few = {"distributed_timeout_seconds": 1.0, "tensor_parallel_size": 4}
        for backend, ranks in ((None, "4 times 1 CPUs"), ("ray", "4 times 1 CPUs")):
            message = f"distributed='ray': there was no room .* a worker with {ranks} .* for 1 s"
            with pytest.raises(ValueError, match=message):
                run(
                    model,
                    tmp_path / "few",
                    options,
                    **few,
                    distributed_executor_backend=backend,
                )
        check_nothing_is_left()


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"ray_address": "here"}, {}, "ray_address='here' .*belongs to distributed='ray'"),
        (
            {"distributed": "ray"},
            {"nnodes": 2, "tensor_parallel_size": 2},
            "distributed='ray' with nnodes=2: leave nnodes out",
        ),
        (
            {},
            {"data_parallel_size": 2, "tensor_parallel_size": 2, **RAY},
            "'ray' with data_parallel_size=2 needs distributed='ray'",
        ),
    ],
)
def test_what_is_refused(
    model: Path, tmp_path: Path, options: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(model, tmp_path / "output", options, **engine)
    assert not (tmp_path / "output").exists()
