"""The limit on rows of all requests together: requests wait in turn, then get 503."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.entrypoints.test_hidden_states_field import check
from vllm import LLM
from vllm.entrypoints.openai import row_memory
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.row_memory import RowMemory

COMPLETIONS = "/v1/completions"
IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(73, [100, 77, 130, 9, 200], 250)]
TOTAL_MIB = 0.25


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    settings = ServerSettings(
        hidden_states_folder=str(folder / "files"), max_total_hidden_states_mib=TOTAL_MIB
    )
    with live_server(tiny_llama, folder, layers=None, settings=settings) as running:
        yield running


class Recording(RowMemory):
    """Knows the most bytes that were reserved at once."""

    peak = 0

    def _grant(self) -> None:
        super()._grant()
        self.peak = max(self.peak, self.num_bytes)


class Holder:
    """Memory that a test reserves on the server's loop."""

    def __init__(self, memory: RowMemory, num_bytes: int) -> None:
        self.stack = ExitStack()
        self.work = memory.reserve(num_bytes, self.stack)


def send(server: LiveServer, **body: Any) -> httpx.Response:
    with server.client() as http:
        return http.post(COMPLETIONS, json=body)


def wait_until_free(memory: RowMemory) -> None:
    """The exchange may end a moment after the client has the reply."""
    deadline = time.monotonic() + 10
    while memory.num_bytes or memory._waiters:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_fifty_requests_at_once(server: LiveServer, tiny_llama: Path) -> None:
    """Inline, as files, as bodies and as streams; together they want 40 times what there is."""
    limit = int(TOTAL_MIB * 2**20)
    server.state.__dict__["row_memory"] = memory = Recording(limit)
    with LLM(str(tiny_llama), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in IDS]
        expected = list(llm.extract(prompts, [0, 2, "norm"], top_logprobs=2))
    size = sum(sample.nbytes for sample in expected)

    def run(number: int) -> None:
        delivery = ("inline", "file", "safetensors")[number % 3]
        asked = {"layers": [0, 2, "norm"], "top_logprobs": 2, "delivery": delivery}
        answer = send(server, prompt=IDS[number % 5], hidden_states=asked)
        assert answer.status_code == 200, answer.text
        if delivery == "inline":
            (choice,) = answer.json()["choices"]
            check(choice["hidden_states"], expected[number % 5])

    with ThreadPoolExecutor(50) as threads:
        list(threads.map(run, range(50)))
    assert 10 * size > 4 * limit
    assert limit / 3 < memory.peak <= limit
    wait_until_free(memory)


def test_who_waits_too_long_gets_503(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "WAIT_SECONDS", 0.05)
    memory = server.state.row_memory
    holder = Holder(memory, 1 << 40)  # as much as there is
    asyncio.run_coroutine_threadsafe(holder.work, server.loop).result(10)
    asked = {"prompt": IDS[0], "hidden_states": {"layers": [1]}}
    refused = send(server, **asked)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "--max-total-hidden-states-mib" in refused.json()["error"]["message"]
    scores = {"sequences": [IDS[3]], "prompt_lengths": [1], "top_logprobs": 2, "temperature": 1.0}
    with server.client() as http:
        assert http.post("/get_sequence_logprobs/", json=scores).status_code == 503
    plain = send(server, prompt=IDS[0], max_tokens=2)
    assert plain.status_code == 200, "requests without rows do not wait"
    server.call(holder.stack.close)
    assert send(server, **asked).status_code == 200
    wait_until_free(memory)


def test_a_client_that_leaves_gives_memory_back(server: LiveServer) -> None:
    memory = server.state.row_memory
    holder = Holder(memory, 1 << 40)
    asyncio.run_coroutine_threadsafe(holder.work, server.loop).result(10)
    body = {"prompt": IDS[0], "hidden_states": {"layers": [1]}}
    with server.client() as http, pytest.raises(httpx.TimeoutException):
        http.post(COMPLETIONS, json=body, timeout=0.2)
    server.call(holder.stack.close)
    assert send(server, prompt=IDS[0], hidden_states={"layers": [1]}).status_code == 200
    wait_until_free(memory)


def test_turns() -> None:
    """A small request does not overtake a large one that waits."""

    async def run() -> list[str]:
        memory, order = RowMemory(100), list[str]()
        stacks = {name: ExitStack() for name in "abcd"}

        async def reserve(name: str, num_bytes: int) -> None:
            await memory.reserve(num_bytes, stacks[name])
            order.append(name)

        sizes = {"a": 60, "b": 90, "c": 10, "d": 500}
        tasks = []
        for name, size in sizes.items():
            tasks.append(asyncio.create_task(reserve(name, size)))
            await asyncio.sleep(0)
        assert order == ["a"]
        for name in "abc":
            while name not in order:
                await asyncio.sleep(0)
            assert memory.num_bytes <= 100
            stacks[name].close()
        await asyncio.gather(*tasks)
        assert memory.num_bytes == 100
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "d"]


def test_one_that_waits_may_be_cancelled() -> None:
    async def run() -> None:
        memory = RowMemory(100)
        first, second = (ExitStack() for _ in range(2))
        await memory.reserve(80, first)
        waiting = asyncio.create_task(memory.reserve(50, second))
        behind = asyncio.create_task(memory.reserve(20, second))
        await asyncio.sleep(0)
        waiting.cancel()
        await behind
        assert memory.num_bytes == 100
        second.close()
        assert memory.num_bytes == 80

    asyncio.run(run())


def test_the_error_is_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "WAIT_SECONDS", 0.01)

    async def run() -> None:
        memory = RowMemory(100)
        await memory.reserve(80, ExitStack())
        with pytest.raises(ApiError) as error:
            await memory.reserve(50, ExitStack())
        assert error.value.status == 503
        assert memory.num_bytes == 80

    asyncio.run(run())
