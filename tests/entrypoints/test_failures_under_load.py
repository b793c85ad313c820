"""64 requests at a time when the engine core is killed, and when the disk is full."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.harness import greedy, random_prompts, rows_of
from tests.engine.storage import assert_no_half_files, assert_only_whole_files, mounted_tmpfs
from tests.engine.storage import remount as remount_tmpfs
from tests.entrypoints.serve_process import ServeProcess, serve
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

NUM_REQUESTS = 64
AT_ONCE_SECONDS = 5.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_REQUESTS) as executor:
        yield executor


def num_running(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return float(line.split()[-1])


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error that the reply is, or that a stream ends with."""
    if reply.headers["content-type"].startswith("application/json"):
        assert reply.status_code in (500, 503)
        content = reply.content
    else:
        events = reply.text.removesuffix("\n\ndata: [DONE]\n\n").split("\n\n")
        content = events[-1].removeprefix("data: ").encode()
    error: dict[str, Any] = json.loads(content)["error"]
    return error


def test_the_core_is_killed(tiny_llama: Path, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Everybody gets an error at once, /health says it, the server ends with a status that is
    not 0, no half-written file or lock stays."""
    folder = tmp_path / "rows"
    prompts = random_prompts(3, [1 + 3 * index for index in range(NUM_REQUESTS)])
    with serve(tiny_llama, folder) as server, server.client() as client:

        def ask(index: int) -> tuple[httpx.Response, float]:
            ids = prompts[index]["prompt_token_ids"]
            body = {"prompt": ids, "max_tokens": 300, "ignore_eos": True, "stream": index % 2 == 1}
            with server.client() as own:
                reply = own.post("/v1/completions", json=body)
            return reply, time.monotonic()

        asked = [pool.submit(ask, index) for index in range(NUM_REQUESTS)]
        while num_running(client) < NUM_REQUESTS:
            assert not any(request.done() for request in asked)
        killed_at = time.monotonic()
        server.core().kill()
        statuses = []
        while server.process.poll() is None and 503 not in statuses:
            try:
                statuses.append(client.get("/health").status_code)
            except httpx.TransportError:
                break
        assert 503 in statuses
        for request in asked:
            reply, answered_at = request.result()
            assert "the engine core's process ended" in error_of(reply)["message"]
            assert answered_at - killed_at < AT_ONCE_SECONDS
        assert server.wait(20) == 1
    assert assert_no_half_files(folder) == set()


def ask_all(
    server: ServeProcess, pool: ThreadPoolExecutor, prompts: list[Any]
) -> list[httpx.Response]:
    def ask(prompt: Any) -> httpx.Response:
        with server.client() as client:
            body = {"prompt": prompt["prompt_token_ids"], "max_tokens": 1}
            return client.post("/v1/completions", json=body)

    return list(pool.map(ask, prompts))


def check_rows(reply: httpx.Response, expected: torch.Tensor) -> Path:
    path = Path(reply.json()["kv_transfer_params"]["hidden_states_path"])
    assert torch.equal(load_hidden_states(path)["hidden_states"], expected)
    return path


def test_the_disk_is_full(
    tiny_llama: Path, tmp_path: Path, pool: ThreadPoolExecutor, reference: LLM
) -> None:
    """Clients without room are told so; the others, and all once there is room, get their rows."""
    prompts = random_prompts(4, [10 + 5 * index for index in range(NUM_REQUESTS)])
    expected = [rows_of(output) for output in reference.generate(prompts, greedy(1))]
    num_bytes = sum(rows.nbytes for rows in expected)
    with (
        mounted_tmpfs(tmp_path / "disk", f"size={num_bytes // 2}") as disk,
        serve(tiny_llama, disk) as server,
    ):
        replies = ask_all(server, pool, prompts)
        names = set()
        for reply, rows in zip(replies, expected, strict=True):
            if reply.status_code == 200:
                names.add(check_rows(reply, rows).name)
            else:
                assert reply.status_code == 507
                assert "No space left on device" in reply.json()["error"]["message"]
        assert 0 < len(names) < NUM_REQUESTS
        assert_only_whole_files(disk, names)

        for path in disk.iterdir():
            path.unlink()
        remount_tmpfs(disk, f"size={2 * num_bytes}")
        for reply, rows in zip(ask_all(server, pool, prompts), expected, strict=True):
            check_rows(reply, rows)
