"""Bodies of rows that are sent while later rows are computed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.models.checkpoints import make_checkpoint
from vllm import LLM
from vllm.entrypoints.openai import row_stream
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.hidden_states import ExtractRequest, HiddenStatesDataset
from vllm.hidden_states.verify import verify_dataset

COMPLETIONS = "/v1/completions"
STEP = 64
BAD_TOKEN = 299
(IDS,) = (prompt["prompt_token_ids"] for prompt in random_prompts(72, [150], 250))
WIDE = {"layers": [0, 1] * 64, "delivery": "safetensors"}
"""36 KiB for each token."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a token whose rows are not finite."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    settings = ServerSettings(hidden_states_folder=str(folder / "files"))
    options = {"max_num_batched_tokens": STEP, "max_model_len": 4096}
    with live_server(model, folder, layers=None, settings=settings, **options) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        yield llm


def body_of(ids: list[int] = IDS, **asked: Any) -> dict[str, Any]:
    return {"prompt": ids, "hidden_states": {"delivery": "safetensors", **asked}}


def wait_until_idle(server: LiveServer) -> None:
    processor, deadline = server.state.engine.output_processor, time.monotonic() + 30
    while server.state.server_load or server.call(processor.has_unfinished_requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("memory", [1 << 24, 1000])
@pytest.mark.parametrize(
    "asked",
    [
        {"layers": [2, "norm", 2]},
        {"layers": [1], "dtype": "fp8", "positions": "every:7"},
        {"layers": [0], "top_logprobs": 4, "hooks": ["blocks.1.hook_mlp_out"]},
        {"hooks": ["blocks.0.attn.hook_z", "blocks.1.hook_resid_mid"]},
        {"layers": [3], "positions": "mask", "mask": [index % 3 == 0 for index in range(150)]},
        {"layers": [3], "mask": [index % 3 == 0 for index in range(150)], "dtype": "bfloat16"},
        {"layers": [3], "positions": [-1, 40, 2]},
        {"layers": [3], "pooling": "mean"},
        {"layers": [3], "positions": []},
    ],
)
def test_rows_are_those_of_extract(
    asked: dict[str, Any],
    memory: int,
    server: LiveServer,
    reference: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_stream, "MEMORY_BYTES", memory)
    with server.client() as http:
        answer = http.post(COMPLETIONS, json=body_of(**asked))
    assert answer.status_code == 200, answer.text
    own = {name: value for name, value in asked.items() if name != "pooling"}
    request = ExtractRequest({"prompt_token_ids": IDS}, **own)
    (expected,) = reference.extract([request], pooling=asked.get("pooling", "none"))
    found = load(answer.content)
    assert torch.equal(found["token_ids"], expected.token_ids)
    for name, tensor in expected.tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].float().nan_to_num(9), tensor.float().nan_to_num(9)), name
    (tmp_path / "a.safetensors").write_bytes(answer.content)
    problems = list(verify_dataset(str(tmp_path)))
    assert problems == [] or (asked["positions"] == [-1, 40, 2] and "not ascending" in problems[0])
    (sample,) = HiddenStatesDataset(tmp_path)
    assert torch.equal(sample.positions, expected.positions)
    assert sample.layer_ids == expected.layer_ids
    assert list(Path(server.state.settings.hidden_states_folder or "").iterdir()) == []


def test_the_first_rows_come_before_the_last_are_computed(server: LiveServer) -> None:
    ids = [5] * 3000
    body = body_of(ids, layers=[1])
    before = server.state.engine.stats.num_steps
    with server.client() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
        chunks = answer.iter_raw()
        content = next(chunks)
        steps = server.state.engine.stats.num_steps - before
        content += b"".join(chunks)
    wait_until_idle(server)
    assert steps < 3000 // STEP <= server.state.engine.stats.num_steps - before
    assert load(content)["hidden_states"].shape[0] == len(ids)


def status_kib(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def test_memory_is_bounded_by_steps(server: LiveServer) -> None:
    """A body of 110 MB, in both processes."""
    pids = [os.getpid(), server.state.engine.core_pid]

    def grown(length: int, **more: Any) -> list[int]:
        before = []
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
            before.append(status_kib(pid, "VmRSS"))
        body = {"prompt": [5] * length, "hidden_states": {**WIDE, **more}}
        with server.client() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            size = sum(map(len, answer.iter_raw()))
            assert size == int(answer.headers["content-length"]) > 32_000 * length
        return [status_kib(pid, "VmHWM") - one for pid, one in zip(pids, before, strict=True)]

    grown(200)
    front, core = grown(3000)
    print(f"memory grown by {front} and {core} KiB")
    assert core < 30 << 10 and front < 60 << 10, (front, core)
    # The order of these positions is only known to the whole.
    assert min(grown(3000, positions=[1, 0, *range(2, 3000)])) > 90 << 10


def read_into(content: bytearray, http: httpx.Client, body: dict[str, Any]) -> None:
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            content += chunk


def test_a_failure_in_the_middle_cuts_the_body(server: LiveServer, reference: LLM) -> None:
    ids = [*IDS, BAD_TOKEN, *IDS]
    content = bytearray()
    with (
        server.client() as http,
        pytest.raises(httpx.RemoteProtocolError, match="without sending complete"),
    ):
        read_into(content, http, body_of(ids, layers=[1]))
    # The header, which says how long the rest is, and some rows.
    assert b'"hidden_states":{"dtype":"F32","shape":[301,1,' in content
    wait_until_idle(server)
    with server.client() as http:
        again = http.post(COMPLETIONS, json=body_of(layers=[1]))
    (expected,) = reference.extract({"prompt_token_ids": IDS}, [1])
    assert torch.equal(load(again.content)["hidden_states"], expected.hidden_states)


def test_a_failure_before_the_first_rows_is_an_error(server: LiveServer) -> None:
    with server.client() as http:
        answer = http.post(COMPLETIONS, json=body_of([BAD_TOKEN, *IDS], layers=[1]))
        refused = http.post(COMPLETIONS, json=body_of(layers=[77]))
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]
    assert refused.status_code == 400


@pytest.mark.parametrize("memory", [1 << 24, 1000])
def test_a_slow_reader_delays_nobody(
    memory: int, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends its request, and others run, while the client reads nothing."""
    monkeypatch.setattr(row_stream, "MEMORY_BYTES", memory)
    content = json.dumps({"prompt": [5] * 500, "hidden_states": WIDE}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        first = slow.recv(4096)
        processor, deadline = server.state.engine.output_processor, time.monotonic() + 30
        while server.call(processor.has_unfinished_requests):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with server.client() as http:
            assert http.post(COMPLETIONS, json=body_of(layers=[1])).status_code == 200
        headers, _, rest = first.partition(b"\r\n\r\n")
        (length,) = (int(line[15:]) for line in headers.split(b"\r\n") if b"content-length" in line)
        assert b"200 OK" in headers, rest
        body = bytearray(rest)
        while len(body) < length:
            body += slow.recv(1 << 20)
    rows = load(bytes(body))["hidden_states"]
    assert rows.shape[:2] == (500, 128) and torch.equal(rows[7, :2], rows[7, 2:4])


def test_clients_that_leave_end_the_work(server: LiveServer) -> None:
    before = server.num_tasks()

    def leave(_: int) -> None:
        body = {"prompt": [5] * 3500, "hidden_states": {**WIDE, "layers": [0, 1] * 60}}
        with server.client() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
            next(answer.iter_raw())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, range(4)))
    wait_until_idle(server)
    deadline = time.monotonic() + 10
    while server.num_tasks() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_the_time_cuts_the_body(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(request_timeout=1.0)
    options = {"max_num_batched_tokens": STEP, "max_model_len": 4096}
    with live_server(model, tmp_path, layers=None, settings=settings, **options) as server:
        content = json.dumps({"prompt": [5] * 2000, "hidden_states": WIDE}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            received = len(slow.recv(4096))
            wait_until_idle(server)
            with suppress(ConnectionResetError):
                while part := len(slow.recv(1 << 20)):
                    received += part
        assert 0 < received < 36_000 * 2000
        with server.client() as http:
            assert http.post(COMPLETIONS, json=body_of(layers=[1])).status_code == 200
    assert "Traceback" not in caplog.text and "without completing" not in caplog.text
