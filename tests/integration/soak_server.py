"""Thousands of requests to ``vllm serve``, a tenth of whose clients leave at a random moment.

    python -m tests.integration.soak_server --family qwen3_5 --requests 2000 --concurrency 256

Every answered request has to be right, bit for bit; afterwards there must be no request, block,
file, thread or descriptor left over, and the processes as large as before. A first round of
WARM_UP requests fills what has a limit (the pool, and the kernels that oneDNN keeps): half of
them find nothing in the prefix cache, so they take new blocks, and steps are of all sizes.
About a minute on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file

from tests.engine.harness import greedy, random_prompts, rows_of
from tests.entrypoints.serve_process import ServeProcess
from tests.integration.launcher import engine_options, make_verifier, serve
from vllm import LLM
from vllm.v1.engine.core_process import REST_AFTER_SECONDS

WARM_UP = 1000
NUM_PROMPTS = 96
LONGEST = 600
LEAVING = 0.1
STREAMING = 0.2
CUT_BODIES = 0.2
RESETS = 0.3
LONGEST_STAY_SECONDS = 1.0
SETTLE_SECONDS = 20.0
REQUEST_SECONDS = 120.0
GROWTH_BYTES = 24 * 2**20
"""Allocators keep some of what the busiest moment took; a leak of 12 KiB a request shows."""
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:hidden_states_bytes_in_flight",
)


@dataclass
class Soak:
    """A running server, what it has to answer, and what has happened so far."""

    server: ServeProcess
    storage: Path
    prompts: list[list[int]]
    rows: list[torch.Tensor]
    rng: random.Random
    asked: int = 0
    answered: int = 0
    left: int = 0
    warming_up: bool = True
    left_too_late: int = 0
    """Clients that meant to leave and had the path of their file before."""
    problems: list[str] = field(default_factory=list)

    async def round(self, count: int, concurrency: int) -> None:
        """``count`` requests, ``concurrency`` at a time."""
        numbers = iter(range(count))
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
        ) as client:

            async def worker() -> None:
                for _ in numbers:
                    await self.one(client)

            await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def one(self, client: httpx.AsyncClient) -> None:
        index = self.rng.randrange(len(self.prompts))
        streams = self.rng.random() < STREAMING
        leaves = self.rng.random() < LEAVING
        self.asked += 1
        body = {
            "request_id": f"{self.asked}-{'stream' if streams else 'whole'}-{leaves=}",
            "prompt": self.prompts[index],
            "max_tokens": self.rng.choice([1, 1, 1, 8]),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": streams,
        }
        if self.warming_up and self.asked % 2:
            body["cache_salt"] = str(self.asked)
        if leaves:
            await self.leave(index, body)
            return
        try:
            params = await self.ask(client, body)
        except (httpx.HTTPError, KeyError) as error:
            self.problems.append(f"prompt {index}: {error!r}")
            return
        self.answered += 1
        self.check(index, Path(params["hidden_states_path"]))

    async def leave(self, index: int, body: dict[str, Any]) -> None:
        """Hang up at a random moment: in the middle of the body, before the answer, during it.

        A file whose path has come by then is the client's, so it takes that.
        """
        url = httpx.URL(self.server.url)
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        sent = len(payload) // 2 if self.rng.random() < CUT_BODIES else len(payload)
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head.encode() + payload[:sent])
            if self.rng.random() < RESETS:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(self.rng.uniform(0, LONGEST_STAY_SECONDS))
            data = arrived(connection)
        path = re.search(rb'"hidden_states_path":"([^"]+)"', data)
        if path is None:
            self.left += 1
        else:
            self.left_too_late += 1
            self.check(index, Path(path[1].decode()))

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        """The reply's kv_transfer_params, of a stream those in its last chunk."""
        if not body["stream"]:
            reply = await client.post("/v1/completions", json=body)
            answer: dict[str, Any] = reply.raise_for_status().json()
            return dict(answer["kv_transfer_params"])
        last = ""
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    last = line.removeprefix("data: ")
        return dict(json.loads(last)["kv_transfer_params"])

    def check(self, index: int, path: Path) -> None:
        """The file is right; it and its lock are then removed, as a client does."""
        tensors = load_file(path)
        right = tensors["token_ids"].tolist() == self.prompts[index]
        if not right or not torch.equal(tensors["hidden_states"], self.rows[index]):
            self.problems.append(f"prompt {index}: wrong values in {path}")
        path.unlink()
        Path(f"{path}.lock").unlink()

    def processes(self) -> dict[str, psutil.Process]:
        return {"server": psutil.Process(self.server.process.pid), "core": self.server.core()}

    def gauges(self) -> dict[str, float]:
        with self.server.client() as http:
            lines = http.get("/metrics").text.splitlines()
            load = http.get("/load").json()["server_load"]
        found = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
        return {name: found[name] for name in GAUGES} | {"/load": load}

    def settled(self) -> Footprint:
        """Footprint of the processes once nothing is left to do."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while any(self.gauges().values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        busy = {name: value for name, value in self.gauges().items() if value}
        time.sleep(REST_AFTER_SECONDS + 1)  # for connections to close, and memory to return
        processes = self.processes()
        return Footprint(
            busy,
            sorted(path.name for path in self.storage.iterdir()),
            {name: process.num_fds() for name, process in processes.items()},
            {name: process.num_threads() for name, process in processes.items()},
            {name: process.memory_info().rss for name, process in processes.items()},
        )


def arrived(connection: socket.socket) -> bytes:
    """Bytes that have arrived and are not read yet."""
    data = b""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while chunk := connection.recv(2**20):
            data += chunk
    return data


@dataclass
class Footprint:
    """Leftovers of a round: nothing but what the processes need for themselves."""

    busy: dict[str, float]
    files: list[str]
    descriptors: dict[str, int]
    threads: dict[str, int]
    resident_bytes: dict[str, int]

    def problems(self, before: Footprint) -> list[str]:
        found = [f"{name} is {value}" for name, value in self.busy.items()]
        found += [f"left behind: {name}" for name in self.files]
        for what in ("descriptors", "threads"):
            if getattr(self, what) != getattr(before, what):
                found.append(f"{what}: {getattr(before, what)}, then {getattr(self, what)}")
        for name, resident in self.resident_bytes.items():
            grown = resident - before.resident_bytes[name]
            if grown > GROWTH_BYTES:
                found.append(f"{name} grew by {grown / 2**20:.1f} MiB")
        return found

    def __str__(self) -> str:
        sizes = {name: f"{size / 2**20:.1f} MiB" for name, size in self.resident_bytes.items()}
        return f"descriptors {self.descriptors}, threads {self.threads}, resident {sizes}"


def soak(family: str, folder: Path, count: int, concurrency: int, seed: int) -> list[str]:
    """Return what went wrong, and print figures."""
    rng = random.Random(seed)
    model = make_verifier(folder / "model", family)
    lengths = [1, LONGEST, *(rng.randint(1, LONGEST) for _ in range(NUM_PROMPTS - 2))]
    prompts = random_prompts(seed, lengths)
    with LLM(str(model), **engine_options(folder / "reference")) as llm:
        rows = [rows_of(output) for output in llm.generate(prompts, greedy(1), use_tqdm=False)]
    storage = folder / "storage"
    with serve(model, storage) as server:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        run = Soak(server, storage, ids, rows, rng)
        asyncio.run(run.round(WARM_UP, concurrency))
        run.warming_up = False
        before = run.settled()
        print(f"{family}, after {WARM_UP} requests: {before}")
        start = time.perf_counter()
        asyncio.run(run.round(count, concurrency))
        seconds = time.perf_counter() - start
        after = run.settled()
    print(f"  {run.answered} answered, {run.left} left, {run.left_too_late} left too late")
    print(f"  after {count} more, in {seconds:.1f} s: {after}")
    return run.problems + after.problems(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        problems = soak(
            options.family, Path(scratch), options.requests, options.concurrency, options.seed
        )
    print("\n".join(f"  PROBLEM: {problem}" for problem in problems[:20]) or "  all right")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
