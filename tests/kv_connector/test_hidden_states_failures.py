"""If one request goes wrong, its reply says why, its files go, and the others live."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kv_connector.connector_harness import Harness, MakeHarness
from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_saver


def spoil(harness: Harness, request_id: str, token: int, column: int, value: float) -> None:
    """Make the model compute something else for one row."""
    honest = harness.rows

    def rows(of: str, num_tokens: int) -> torch.Tensor:
        result = honest(of, num_tokens).clone()
        if of == request_id and token < num_tokens:
            if value == 0:
                result[token, column] = 0
            else:
                result[token, column, 2] = value
        return result

    harness.rows = rows  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.0])
@pytest.mark.parametrize("piece_rows", [1, 4, 1000])
def test_rows_that_cannot_be_right(
    make_harness: MakeHarness, storage: Path, value: float, piece_rows: int
) -> None:
    harness = make_harness(options={"max_bytes_in_flight": piece_rows * 3 * 7 * 4})
    for name in ("before", "bad", "after"):
        harness.add(name, 20)
    spoil(harness, "bad", token=17, column=1, value=value)
    harness.step({"before": 20, "bad": 13, "after": 20})
    harness.step({"bad": 7})
    harness.step()  # the failure may be reported at once, and the request goes on regardless
    for name in ("before", "bad", "after"):
        harness.finish(name)
    harness.idle_until_done("before", "bad", "after")
    harness.worker.shutdown()

    what = "all zero" if value == 0 else "not finite"
    assert harness.failures == {"bad": f"hidden states of token 17, layer 3 are {what}"}
    for name in ("before", "after"):
        rows = load_file(storage / f"{name}.safetensors")["hidden_states"]
        assert torch.equal(rows, harness.rows(name, 20))
    assert not [name for name in os.listdir(storage) if "bad" in name]


def test_a_padding_embedding_may_be_zero(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness(layer_ids=(3, 0))
    harness.add("r", 4)
    spoil(harness, "r", token=2, column=1, value=0.0)
    harness.step({"r": 4})
    harness.finish("r")
    harness.idle_until_done("r")
    assert harness.failures == {}
    assert load_file(storage / "r.safetensors")["hidden_states"][2, 1].abs().sum() == 0


def test_a_failure_is_told_before_the_request_ends(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add("r", 9)
    spoil(harness, "r", token=1, column=2, value=float("nan"))
    harness.step({"r": 4})
    harness.idle_until_failed("r")
    assert harness.done == set()


def test_missing_rows_are_no_file(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    harness.add("r", 9)
    harness.step({"r": 4})
    harness.finish("r")
    harness.idle_until_done("r")
    assert "4 rows of hidden states were computed for 9 tokens" in harness.failures["r"]
    assert os.listdir(storage) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(make_harness: MakeHarness, small_disk: Path) -> None:
    harness = make_harness(options={"shared_storage_path": str(small_disk)}, hidden_size=512)
    harness.add("large", 40)
    harness.step({"large": 10})
    harness.step({"large": 30})
    harness.finish("large")
    harness.idle_until_done("large")
    reason = harness.failures["large"]
    assert "No space left on device" in reason
    assert str(small_disk / "large.safetensors") in reason
    assert "free some space" in reason
    assert os.listdir(small_disk) == []

    harness.add("small", 5)
    harness.step({"small": 5})
    harness.finish("small")
    harness.idle_until_done("small")
    rows = load_file(small_disk / "small.safetensors")["hidden_states"]
    assert torch.equal(rows, harness.rows("small", 5))


def test_disk_full_at_the_last_byte(
    make_harness: MakeHarness, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids and header are written after the request has ended."""
    harness = make_harness()
    harness.add("r", 4)
    harness.step({"r": 4})

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    harness.finish("r")
    harness.idle_until_done("r")
    assert "No space left on device" in harness.failures["r"]
    assert os.listdir(storage) == []


def test_the_folder_vanishes_and_is_made_again(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    os.rmdir(storage)
    harness.add("r", 4)
    harness.step({"r": 4})
    harness.finish("r")
    harness.idle_until_done("r")
    assert harness.failures == {}
    assert torch.equal(load_file(storage / "r.safetensors")["hidden_states"], harness.rows("r", 4))


def test_a_path_that_cannot_be_written(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness(options={"allow_custom_save_path": True})
    (storage / "file").write_text("not a folder")
    harness.add("r", 4, {"hidden_states_path": "file/r.safetensors"})
    harness.step({"r": 4})
    harness.finish("r")
    harness.idle_until_done("r")
    assert str(storage / "file" / "r.safetensors") in harness.failures["r"]
    assert (storage / "file").read_text() == "not a folder"


def test_a_lock_that_somebody_holds(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    with open(storage / "r.safetensors.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        harness.add("r", 4)
        harness.step({"r": 4})
        harness.finish("r")
        harness.idle_until_done("r")
        assert "holds its lock" in harness.failures["r"]
        assert os.listdir(storage) == ["r.safetensors.lock"]  # it is not ours


def test_a_slow_disk_makes_the_engine_wait(
    make_harness: MakeHarness, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = 3 * 7 * 4
    harness = make_harness(options={"max_bytes_in_flight": 10 * row_bytes})
    disk_works = threading.Event()
    pwrite = os.pwrite

    def slow_pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        assert disk_works.wait(60)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow_pwrite)
    harness.add("a", 30)
    harness.step({"a": 10})  # just fits
    blocked = threading.Thread(target=harness.step, args=({"a": 20},))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    assert harness.worker._saver._budget._used_bytes == 10 * row_bytes  # type: ignore[attr-defined]
    disk_works.set()
    blocked.join(60)
    assert not blocked.is_alive()
    harness.finish("a")
    harness.idle_until_done("a")
    rows = load_file(storage / "a.safetensors")["hidden_states"]
    assert torch.equal(rows, harness.rows("a", 30))
    assert harness.worker._saver._budget._used_bytes == 0  # type: ignore[attr-defined]


def test_many_files_at_once_do_not_exhaust_descriptors(
    make_harness: MakeHarness, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states_saver, "_MAX_FILES_FINISHING", 3)
    harness = make_harness(options={"num_writer_threads": 1})
    names = [f"r{number}" for number in range(30)]
    for name in names:
        harness.add(name, 2)
        harness.step({name: 2})
        harness.finish(name)
    harness.idle_until_done(*names)
    assert harness.failures == {}
    for name in names:
        rows = load_file(storage / f"{name}.safetensors")["hidden_states"]
        assert torch.equal(rows, harness.rows(name, 2))
