"""Several engines: the same dataset, whoever dies on the way."""

from __future__ import annotations

import errno
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tests.extract.fake_engine import DEADLY_TOKEN, FAILING_TOKEN, MARKER
from tests.extract.job_harness import check_rows, digests, run, token_lists, write_token_ids
from tests.hidden_states.sample_data import make_samples, make_settings
from tests.ray_clusters import ray_cluster
from vllm.entrypoints.extract import processes
from vllm.entrypoints.extract import worker as worker_module
from vllm.entrypoints.extract.plan import PlannedSample
from vllm.entrypoints.extract.unit_queue import MAX_ATTEMPTS, Progress, UnitQueue
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.sample import FailedSample
from vllm.utils import stop_watch
from vllm.utils.whole_files import write_whole

LISTS = token_lists(1, 60)
LISTS[31] = [4, DEADLY_TOKEN, 5]


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "an_engine_has_died"
    monkeypatch.setenv(MARKER, str(path))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=os.pathsep)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_token_ids(tmp_path / "data.jsonl", LISTS)


@pytest.fixture
def expected(tiny_llama: Path, data: Path, tmp_path: Path, marker: Path) -> dict[str, str]:
    """Digests of the files that one process makes."""
    marker.touch()
    run(tiny_llama, data, tmp_path / "alone")
    marker.unlink()
    return digests(tmp_path / "alone")


def test_two_processes_one_dies(
    tiny_llama: Path, data: Path, tmp_path: Path, marker: Path, expected: dict[str, str]
) -> None:
    output = tmp_path / "output"
    assert run(tiny_llama, data, output, data_parallel_size=2) == 0
    assert marker.exists()
    check_rows(output, LISTS)
    assert digests(output) == expected


def test_a_stopped_process_is_named(
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
    expected: dict[str, str],
    marker: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps the others waiting until it goes on; nothing is lost."""
    marker.touch()
    monkeypatch.setattr(stop_watch, "STOPPED_SECONDS", 0.5)
    output = tmp_path / "output"

    class Stopper(stop_watch.StopWatch):
        """Stops the first worker, and lets it go on once it is named."""

        def __init__(self, name: str, pid: int) -> None:
            super().__init__(name, pid)
            if name == "worker 0":
                os.kill(pid, signal.SIGSTOP)

        def check(self) -> bool:
            if is_long := super().check():
                os.kill(self._pid, signal.SIGCONT)
            return is_long

    monkeypatch.setattr(processes, "StopWatch", Stopper)
    assert run(tiny_llama, data, output, data_parallel_size=2) == 0
    assert re.search(r"worker 0 \(process \d+\) has been stopped for \d+ s by SIGSTOP", caplog.text)
    assert digests(output) == expected


def test_only_workers_are_needed_beside_the_command(
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
    expected: dict[str, str],
    marker: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process that knew the units could die or be stopped, too."""
    marker.touch()
    spared = {child.pid for child in psutil.Process().children()}  # of earlier tests

    class Killer(stop_watch.StopWatch):
        def __init__(self, name: str, pid: int) -> None:
            super().__init__(name, pid)
            spared.add(pid)

        def check(self) -> bool:
            for child in psutil.Process().children():
                if child.pid not in spared:
                    with suppress(psutil.Error):  # it has ended
                        if "resource_tracker" not in str(child.cmdline()):
                            child.kill()
            return super().check()

    monkeypatch.setattr(processes, "StopWatch", Killer)
    output = tmp_path / "output"
    assert run(tiny_llama, data, output, data_parallel_size=2) == 0
    assert digests(output) == expected


def test_a_failing_sample_ends_all_processes(
    tiny_llama: Path, tmp_path: Path, marker: Path
) -> None:
    lists = [*LISTS[:20], [FAILING_TOKEN]]
    data = write_token_ids(tmp_path / "data.jsonl", lists)
    output = tmp_path / "output"
    with pytest.raises(RuntimeError, match=r"sample 20 \(record 20\): it was told to"):
        run(tiny_llama, data, output, data_parallel_size=2, on_error="fail")
    assert not [name for name in digests(output) if name.endswith(".tmp")]


def test_two_ray_actors_one_dies(
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
    marker: Path,
    expected: dict[str, str],
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    output = tmp_path / "output"
    with ray_cluster([2]):
        assert run(tiny_llama, data, output, data_parallel_size=2, distributed="ray") == 0
    assert marker.exists()
    assert digests(output) == expected


# Handing out units


def test_units_of_the_dead_come_first_and_in_order() -> None:
    queue = UnitQueue([0, 1, 2, 3])
    assert [queue.claim(7), queue.claim(8), queue.claim(7)] == [0, 1, 2]
    queue.report(7, Progress(samples=1))
    queue.release(7)
    assert queue.progress() == Progress()
    assert [queue.claim(8) for _ in range(4)] == [0, 2, 3, None]
    assert not queue.is_finished()
    for unit in range(4):
        queue.report(8, Progress(1, 10, 0.5))
        queue.commit(8, unit)
    assert queue.is_finished()
    assert queue.progress() == Progress(4, 40, 2.0)


def test_a_unit_that_kills_everyone() -> None:
    queue = UnitQueue([0, 1])
    for worker in range(MAX_ATTEMPTS - 1):
        assert queue.claim(worker) == 0
        queue.release(worker)
    queue.claim(9)
    with pytest.raises(RuntimeError, match=f"{MAX_ATTEMPTS} workers died over unit 0"):
        queue.release(9)


def test_workers_that_never_begin() -> None:
    queue = UnitQueue([0])
    for worker in range(MAX_ATTEMPTS):
        queue.release(worker)
    with pytest.raises(RuntimeError, match="in a row died before they finished a unit"):
        queue.release(9)


# The writer's thread


def item(number: int) -> worker_module._Item:
    planned = PlannedSample(number, number, [5, 6, 7], None, 0, "", {})
    failure = Failure(FailureKind.STEP_FAILED, "")
    return worker_module._Item(planned, 0, range(1000), FailedSample(number, "", failure))


def test_waiting_tokens_count_where_there_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_WAITING_BYTES", 1)
    written: list[worker_module._Item] = []
    with worker_module._WriterThread(written.append) as thread:
        for number in range(50):
            thread.put(item(number))
            assert len(written) >= number
    assert [one.planned.sample for one in written] == list(range(50))


def test_nothing_is_written_after_a_failure() -> None:
    written: list[int] = []

    def write(one: worker_module._Item) -> None:
        if one.planned.sample == 3:
            raise OSError("full")
        written.append(one.planned.sample)

    def put_all() -> None:
        with worker_module._WriterThread(write) as thread:
            for number in range(6):
                thread.put(item(number))

    with pytest.raises(OSError, match="full"):
        put_all()
    assert written == [0, 1, 2]


def test_an_interrupt_drops_no_item_before_one_that_is_written() -> None:
    def put_some(written: list[worker_module._Item]) -> None:
        with worker_module._WriterThread(written.append) as thread:
            for number in range(100):
                thread.put(item(number))
            raise KeyboardInterrupt

    for _ in range(100):
        written: list[worker_module._Item] = []
        with pytest.raises(KeyboardInterrupt):
            put_some(written)
        assert [one.planned.sample for one in written] == list(range(len(written)))


def test_a_sample_that_is_missing_in_its_unit_is_noticed(tmp_path: Path) -> None:
    """Whatever lost it: a unit is committed with all of its samples or not at all."""
    job = worker_module.WorkerJob(
        tmp_path, make_settings(make_samples([3, 3, 3])), Mock(), Mock(), "skip"
    )
    writing = worker_module._UnitWriting(0, job, Mock())
    writing.write(item(0))
    writing.write(item(1))
    with pytest.raises(AssertionError, match="sample 3 came instead of 2"):
        writing.write(item(3))
    writing.close()
    assert not list(tmp_path.rglob("*.json"))


def test_a_limit_on_files_is_named() -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "raise the limit (ulimit -f)" in worker_module.why_ended(error).message


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    place = tmp_path / "shard-00000.safetensors"
    place.mkdir()
    with pytest.raises(IsADirectoryError) as found:
        write_whole(place, b"rows")
    message = worker_module.why_ended(found.value).message
    assert message.startswith(f"{place} is a folder, where the dataset has a file: move it away")
