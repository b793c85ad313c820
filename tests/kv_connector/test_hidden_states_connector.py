"""The connector through both roles: every file holds exactly its rows, however they came."""

from __future__ import annotations

import fcntl
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.kv_connector.connector_harness import Harness, MakeHarness
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    extract_from_kv_cache,
    load_hidden_states,
)
from vllm.v1.request import RequestStatus
from vllm.version import __version__


def check_file(harness: Harness, path: str, request_id: str, token_ids: list[int]) -> None:
    tensors = load_hidden_states(path)
    assert tensors["token_ids"].tolist() == token_ids
    assert torch.equal(tensors["hidden_states"], harness.rows(request_id, len(token_ids)))


def take_as_client(path: str) -> dict[str, torch.Tensor]:
    """Do as speculators and hs_connectors do: lock, remove the lock, then read."""
    lock = path + ".lock"
    if os.path.exists(lock):
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the reply is out: no waiting
        os.close(descriptor)
        os.remove(lock)
    return load_file(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[23], [1] * 23, [5, 5, 5, 5, 3], [7, 1, 15], [4, 19]])
def test_chunks(make_harness: MakeHarness, chunks: list[int], dtype: torch.dtype) -> None:
    harness = make_harness(dtype=dtype)
    request = harness.add("r", 23)
    for chunk in chunks:
        harness.step({"r": chunk})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert params is not None
    check_file(harness, params["hidden_states_path"], "r", request.prompt_token_ids)
    assert harness.failures == {}


def test_the_file_describes_itself(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness(layer_ids=(5, 0, 5))
    harness.add("r", 3)
    harness.step({"r": 3})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert params == {"hidden_states_path": str(storage / "r.safetensors")}
    with safe_open(storage / "r.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["model"] == "tiny-model"
    assert json.loads(metadata["layer_ids"]) == [5, 0, 5]
    assert "residual stream" in metadata["layer_convention"]
    assert metadata["dtype"] == "float32"
    assert metadata["engine_version"] == __version__
    assert metadata["checksum.hidden_states"].startswith("xxh3_128:")


def test_prefix_hit_rows_are_included(make_harness: MakeHarness) -> None:
    harness = make_harness()
    request = harness.add("r", 31)
    harness.step({"r": 4}, hits={"r": 18})
    harness.step({"r": 9})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert params is not None
    check_file(harness, params["hidden_states_path"], "r", request.prompt_token_ids)


def test_output_tokens_on_request(make_harness: MakeHarness) -> None:
    harness = make_harness()
    with_output = harness.add("all", 8, {"include_output_tokens": True, "unknown": 1})
    prompt_only = harness.add("prompt", 8)
    harness.step({"all": 8, "prompt": 8})
    for _ in range(11):
        harness.step({"all": 1, "prompt": 1})
    paths = [harness.finish("all"), harness.finish("prompt")]
    harness.idle_until_done("all", "prompt")
    for params, name, ids in (
        (paths[0], "all", with_output.all_token_ids[:-1]),
        (paths[1], "prompt", prompt_only.prompt_token_ids),
    ):
        assert params is not None
        check_file(harness, params["hidden_states_path"], name, ids)
    assert len(with_output.all_token_ids) == 8 + 12


@pytest.mark.parametrize("hit", [0, 6, 15])
def test_preempted_and_resumed(make_harness: MakeHarness, hit: int) -> None:
    harness = make_harness()
    request = harness.add("r", 26, {"include_output_tokens": True})
    harness.step({"r": 13})
    harness.preempt("r")
    harness.step()
    for chunk in (3, 9, 14):  # 12 rows before those sent, then new ones; hits take their place
        if hit and not harness.requests["r"].num_computed:
            harness.step({"r": 1}, hits={"r": hit})
            continue
        left = request.num_tokens - harness.requests["r"].num_computed
        harness.step({"r": min(chunk, left)})
    while harness.requests["r"].num_computed < 30:
        harness.step({"r": 1})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert params is not None
    check_file(harness, params["hidden_states_path"], "r", request.all_token_ids[:-1])


def test_many_requests_in_any_order(make_harness: MakeHarness, storage: Path) -> None:
    """Random steps over a pool that is poisoned as soon as it may be."""
    dice = random.Random(5)
    harness = make_harness(
        options={"max_bytes_in_flight": 700, "num_writer_threads": 3}, num_blocks=80
    )
    expected: dict[str, tuple[str, list[int]]] = {}
    for number in range(60):
        everything = dice.random() < 0.5
        harness.add(f"r{number}", dice.randint(1, 40), {"include_output_tokens": everything})
    waiting = list(harness.requests)
    running: list[str] = []
    while waiting or running:
        while waiting and len(running) < 5:
            running.append(waiting.pop(0))
        if dice.random() < 0.1:
            harness.preempt(dice.choice(running))
        chosen = dice.sample(running, dice.randint(1, len(running)))
        tokens = {}
        hits = {}
        for name in chosen:
            tracked = harness.requests[name]
            left = tracked.request.num_tokens - tracked.num_computed
            if not tracked.num_computed and left > 1 and dice.random() < 0.3:
                hits[name] = dice.randint(1, left - 1)
                left -= hits[name]
            tokens[name] = dice.randint(1, min(left, 12))
        harness.step(tokens, hits)
        for name in chosen:
            request = harness.requests[name].request
            if request.num_output_tokens and dice.random() < 0.4:
                running.remove(name)
                params = harness.finish(name)
                everything = (request.kv_transfer_params or {})["include_output_tokens"]
                ids = request.all_token_ids[:-1] if everything else request.prompt_token_ids
                assert params is not None
                expected[name] = (params["hidden_states_path"], ids)
    harness.idle_until_done(*expected)
    assert harness.failures == {}
    for name, (path, ids) in expected.items():
        check_file(harness, path, name, ids)
    assert len(os.listdir(storage)) == 2 * 60  # files and locks, nothing temporary


def test_lock_covers_the_file_until_it_is_whole(make_harness: MakeHarness) -> None:
    harness = make_harness()
    request = harness.add("r", 9)
    harness.step({"r": 4})
    (lock,) = (p for p in os.listdir(harness_folder(harness)) if p.endswith(".lock"))
    lock_path = os.path.join(harness_folder(harness), lock)
    assert os.stat(lock_path).st_mode & 0o777 == 0o644
    with open(lock_path) as client, pytest.raises(BlockingIOError):
        fcntl.flock(client, fcntl.LOCK_SH | fcntl.LOCK_NB)
    harness.step({"r": 5})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert params is not None
    tensors = take_as_client(params["hidden_states_path"])
    assert tensors["token_ids"].tolist() == request.prompt_token_ids
    assert torch.equal(tensors["hidden_states"], harness.rows("r", 9))
    harness.worker.shutdown()
    assert os.listdir(harness_folder(harness)) == ["r.safetensors"]


def harness_folder(harness: Harness) -> str:
    extra = harness.scheduler._kv_transfer_config.kv_connector_extra_config
    return str(extra["shared_storage_path"])


def test_locks_can_be_off(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness(options={"use_synchronization_lock": False})
    request = harness.add("r", 4)
    harness.step({"r": 4})
    params = harness.finish("r")
    harness.idle_until_done("r")
    assert os.listdir(storage) == ["r.safetensors"]
    assert params is not None
    check_file(harness, params["hidden_states_path"], "r", request.prompt_token_ids)


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("moment", ["waiting", "prefill", "decode", "preempted"])
def test_an_aborted_request_leaves_nothing(
    make_harness: MakeHarness, storage: Path, moment: str, status: RequestStatus
) -> None:
    harness = make_harness()
    harness.add("r", 12)
    if moment != "waiting":
        harness.step({"r": 12 if moment == "decode" else 7})
    if moment == "preempted":
        harness.preempt("r")
    assert harness.finish("r", status) is None
    harness.step()
    harness.worker.shutdown()
    assert os.listdir(storage) == []
    assert harness.done == set()


@pytest.mark.parametrize("moment", ["not begun", "under way", "complete"])
def test_an_abort_before_the_reply_leaves_nothing(
    make_harness: MakeHarness, storage: Path, moment: str
) -> None:
    harness = make_harness()
    request = harness.add("r", 12)
    harness.step({"r": 12})
    harness.finish("r")
    if moment != "not begun":
        # The worker learns of the end, but what it reports has not come back yet.
        metadata = harness.scheduler.build_connector_meta(harness._scheduler_output({}))
        harness.worker.bind_connector_metadata(metadata)
    if moment == "complete":
        while not (storage / "r.safetensors").exists():
            os.sched_yield()
    harness.abort_delivery(request)
    harness.idle_until_done("r")
    harness.worker.shutdown()
    assert os.listdir(storage) == []
    assert harness.failures == {}


def test_shutdown_keeps_whole_files_only(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    harness.add("whole", 6)
    harness.add("part", 6)
    harness.step({"whole": 6, "part": 3})
    harness.finish("whole")
    harness.step()
    harness.worker.shutdown()
    harness.worker.shutdown()
    assert sorted(os.listdir(storage)) == ["whole.safetensors", "whole.safetensors.lock"]
    check_file(harness, str(storage / "whole.safetensors"), "whole", list(range(100, 106)))


def test_extract_from_kv_cache_reads_strided_blocks() -> None:
    wide = torch.full((6, 4, 2, 9), float("nan"))  # [blocks, rows, layers, hidden + rest]
    kv_cache = wide[..., 1:6].permute(0, 2, 1, 3)  # [blocks, layers, rows, hidden]
    expected = torch.randn(7, 2, 5)
    slots = torch.tensor([8, 9, 10, 11, 20, 21, 22, 23, 3])
    for row, slot in zip(expected, slots.tolist(), strict=False):
        kv_cache[slot // 4, :, slot % 4] = row
    assert torch.equal(extract_from_kv_cache(kv_cache, slots, 7), expected)
