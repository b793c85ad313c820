"""A folder that cannot be written: the request says so, nothing half-written stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.engine.storage import assert_only_whole_files, mounted_tmpfs, names_in, remount
from vllm import LLM
from vllm.outputs import RequestOutput

Checkpoint = Callable[..., Path]


def run(llm: LLM, prompts: list[Any], max_tokens: int = 1) -> list[RequestOutput]:
    return llm.generate(prompts, with_output_tokens(max_tokens), use_tqdm=False)


def reasons(outputs: list[RequestOutput]) -> list[tuple[str | None, Any]]:
    return [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]


def name_of(output: RequestOutput) -> str:
    assert output.kv_transfer_params is not None
    return Path(output.kv_transfer_params["hidden_states_path"]).name


@pytest.mark.parametrize("where", ["below a file", "a file", "in /proc"])
def test_a_folder_that_cannot_be_made(where: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    path = {"below a file": file / "x", "a file": file, "in /proc": Path("/proc/x/y")}[where]
    with (
        pytest.raises(ValueError, match=f"shared_storage_path='{path}' cannot be written: "),
        engine(checkpoint("llama"), **extraction_config([1], path)),
    ):
        pass
    assert file.read_text() == "not a folder"


def test_a_read_only_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with (
        mounted_tmpfs(tmp_path / "disk", "size=64k,ro") as disk,
        pytest.raises(ValueError, match="cannot be written: Read-only file system"),
        engine(checkpoint("llama"), **extraction_config([1], disk)),
    ):
        pass


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("chunk", [32, 512])
def test_a_full_disk(family: str, chunk: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prompts of 10 and 20 tokens fit on it, one of 300 does not."""
    folder = checkpoint(family)
    small_a, large, small_b = random_prompts(1, [10, 300, 20])
    with engine(folder, **extraction_config([1, 4], tmp_path / "large")) as llm:
        expected = [rows_of(output) for output in run(llm, [small_a, large, small_b], 3)]
    disk = tmp_path / "disk"
    with mounted_tmpfs(disk, "size=100k"):
        # One writer: while the large file fills the disk nobody else writes.
        config = extraction_config([1, 4], disk, num_writer_threads=1)
        with engine(folder, max_num_batched_tokens=chunk, **config) as llm:
            outputs = run(llm, [small_a, large, small_b], 3)
            finish_reason, reason = reasons(outputs)[1]
            assert finish_reason == "error"
            assert "No space left on device (free some space" in str(reason)
            assert str(disk) in str(reason)
            assert outputs[1].kv_transfer_params is None
            for index in (0, 2):
                assert torch.equal(rows_of(outputs[index]), expected[index])
            assert_only_whole_files(disk, {name_of(outputs[0]), name_of(outputs[2])})

            remount(disk, "size=1m")
            (output,) = run(llm, [large], 3)
            assert torch.equal(rows_of(output), expected[1])


def test_a_disk_that_becomes_read_only(checkpoint: Checkpoint, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    prompts = random_prompts(2, [12, 40])
    with mounted_tmpfs(disk, "size=1m"):
        config = extraction_config([1, 4], disk)
        with engine(checkpoint("qwen3_5"), max_num_batched_tokens=32, **config) as llm:
            before = run(llm, prompts)
            remount(disk, "ro")
            for finish_reason, reason in reasons(run(llm, prompts)):
                assert finish_reason == "error"
                assert "Read-only file system" in str(reason)
            remount(disk, "rw")
            after = run(llm, prompts)
            for output, again in zip(before, after, strict=True):
                assert torch.equal(rows_of(output), rows_of(again))
            assert_only_whole_files(disk, {name_of(output) for output in before + after})


def test_a_folder_that_vanishes_is_made_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    storage = tmp_path / "a" / "b"
    (prompt,) = random_prompts(3, [12])
    with engine(checkpoint("llama"), **extraction_config([2], storage)) as llm:
        storage.rmdir()
        storage.parent.rmdir()
        (output,) = run(llm, [prompt])
        assert len(rows_of(output)) == 12


def test_running_out_of_memory_on_the_way_to_the_disk(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong there, later rows still find room in the budget."""
    config = extraction_config([1, 4], tmp_path, max_bytes_in_flight=4000)
    prompts = random_prompts(4, [30, 6])
    with engine(checkpoint("llama"), **config) as llm:
        expected = [rows_of(output) for output in run(llm, prompts)]
        transport = type(
            core_of(llm).executor.worker.model_runner.connector.connector._saver._transport
        )
        for _ in range(5):

            def no_memory(*_: Any) -> Any:
                raise MemoryError("no memory")

            monkeypatch.setattr(transport, "gather", no_memory)
            assert reasons(run(llm, prompts)) == [("error", "MemoryError: no memory")] * 2
            monkeypatch.undo()
        for output, rows in zip(run(llm, prompts), expected, strict=True):
            assert torch.equal(rows_of(output), rows)


def test_an_aborted_request_leaves_no_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = random_prompts(5, [40, 70])
    config = extraction_config([1, 4], tmp_path)
    with engine(checkpoint("qwen3_5"), max_num_batched_tokens=32, **config) as llm:
        delivered = set()
        for num_steps in range(8):
            for index, prompt in enumerate(prompts):
                llm.llm_engine.add_request(str(index), prompt, greedy(2))
            for _ in range(num_steps):
                outputs = llm.llm_engine.step()
                delivered |= {name_of(output) for output in outputs if output.finished}
            llm.llm_engine.abort_request(["0", "1"])
            llm.llm_engine.settle()
            assert not llm.llm_engine.has_unfinished_requests()
            assert_only_whole_files(tmp_path, delivered)


def test_shutdown_completes_what_ended_and_removes_the_rest(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    llm = LLM(
        str(checkpoint("llama")), kv_cache_memory_bytes=2**24, **extraction_config([1, 4], tmp_path)
    )
    llm.llm_engine.add_request("ends", random_prompts(6, [20])[0], greedy(1))
    llm.llm_engine.add_request("goes on", random_prompts(6, [20])[0], greedy(9))
    llm.llm_engine.step()
    llm.llm_engine.step()
    llm.shutdown()
    (name,) = (name for name in names_in(tmp_path) if name.endswith(".safetensors"))
    assert name.startswith("ends-")
    assert not name.startswith(".")
    assert_only_whole_files(tmp_path, {name})
    assert os.path.getsize(tmp_path / name) > 20 * 2 * 72 * 4
