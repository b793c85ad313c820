"""An attack on a server: mixed requests of every kind at once, then it has to be as before."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.serve_process import ServeProcess, serve
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run, relative_error
from vllm.hidden_states.mapped_file import MappedFile

SECONDS = 60.0
PROMPT = [5, 6, 7, 8, 9, 10, 11]
LONG_PROMPT = [1 + 7 * index * index % 249 for index in range(300)]
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 10**30, "", "x", "\ud83d\ude00", [], [[]], {}, {"a": {}}),
    *([None], [-1], [10**9], ["a", 1], [[1], [2]], "9" * 5000, [1] * 5000),
)
FIELDS = (
    *("prompt", "max_tokens", "n", "temperature", "top_p", "stop", "stream", "stream_options"),
    *("logprobs", "kv_transfer_params", "model", "priority", "seed", "logit_bias", "messages"),
    *("truncate_prompt_tokens", "echo", "suffix", "min_tokens", "ignore_eos", "unknown_field"),
)
DEEP = "[" * 50_000 + "]" * 50_000


class Attack:
    """Requests of one client."""

    def __init__(self, server: ServeProcess, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.http = httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False)
        self.statuses: Counter[int] = Counter()
        self.urls: list[str] = []

    def run(self, num_requests: int) -> Counter[int]:
        kinds: list[Callable[[], httpx.Response | None]] = [
            *(self.complete, self.complete, self.chat, self.wrong_field, self.broken_body),
            *(self.compressed, self.abandoned_stream, self.cut_off_body, self.download),
            *(self.odd_paths, self.delete, self.slow_body),
        ]
        with self.http:
            for _ in range(num_requests):
                kind = self.rng.choice(kinds)
                answer = kind()
                if answer is None:
                    continue
                self.statuses[answer.status_code] += 1
                assert answer.status_code < 500, (kind.__name__, answer.text)
                if answer.status_code >= 400 and answer.request.method != "HEAD":
                    body = answer.json()  # "detail": there is no such path, or not this method
                    assert set(body) == {"detail"} or body["error"]["code"] == answer.status_code
        return self.statuses

    def body(self) -> dict[str, Any]:
        rng = self.rng
        prompt = [rng.randrange(1, 250) for _ in range(rng.choice((1, 3, 17, 60, 200, 510)))]
        return {
            "prompt": rng.choice((prompt, [prompt, prompt[:2]], "some text of a user", PROMPT)),
            "max_tokens": rng.choice((1, 1, 2, 9)),
            "n": rng.choice((1, 1, 1, 2)),
            "temperature": rng.choice((0, 1.0)),
        }

    def complete(self) -> httpx.Response:
        answer = self.http.post("/v1/completions", json=self.body())
        if answer.status_code == 200:
            params = answer.json().get("kv_transfer_params") or {}
            self.urls += [params["hidden_states_url"]] if "hidden_states_url" in params else []
        return answer

    def chat(self) -> httpx.Response:
        messages = [{"role": self.rng.choice(("user", "system", "x")), "content": "hello"}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})

    def wrong_field(self) -> httpx.Response:
        path = self.rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize"))
        body = self.body() | {"messages": [{"role": "user", "content": "x"}]}
        body[self.rng.choice(FIELDS)] = self.rng.choice(WRONG_VALUES)
        body["n"] = min(body["n"], 2) if isinstance(body["n"], int) else body["n"]
        return self.http.post(path, content=json.dumps(body).encode())

    def broken_body(self) -> httpx.Response:
        content = self.rng.choice(
            (b"", b"{", b"\xff\xfe", b"null", b"[]", b'"x"', b"{}{}", DEEP.encode(), b"NaN")
        )
        headers = {"content-type": self.rng.choice(("application/json", "text/plain", "x"))}
        return self.http.post("/v1/completions", content=content, headers=headers)

    def compressed(self) -> httpx.Response:
        """Bodies are taken as they are; what is compressed is no JSON."""
        encoding = self.rng.choice(("gzip", "deflate", "br", "x"))
        content = gzip.compress(json.dumps(self.body()).encode() + b" " * 10_000_000)
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        answer = self.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code in (400, 415), answer.text
        return answer

    def abandoned_stream(self) -> None:
        body = self.body() | {"stream": True, "max_tokens": 200}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_bytes():
                return

    def raw(self, head: str, *pieces: bytes) -> None:
        address = httpx.URL(self.server.url)
        with (
            suppress(OSError),
            socket.create_connection((address.host, address.port or 80), SECONDS) as connection,
        ):
            connection.sendall(f"{head}\r\nhost: x\r\ncontent-length: 300\r\n\r\n".encode())
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            connection.settimeout(0.05)
            connection.recv(100)

    def cut_off_body(self) -> None:
        self.raw("POST /v1/completions HTTP/1.1", b'{"prompt": [1')

    def slow_body(self) -> None:
        self.raw("POST /v1/completions HTTP/1.1", *[b" "] * 10)

    def download(self) -> httpx.Response | None:
        if not self.urls:
            return None
        headers = self.rng.choice(
            ({}, {"range": "bytes=0-9"}, {"range": "bytes=9-"}, {"range": "bytes=x"}, {"range": ""})
        )
        return self.http.get(self.rng.choice(self.urls), headers=headers)

    def delete(self) -> httpx.Response | None:
        if len(self.urls) < 4:
            return None
        return self.http.delete(self.urls.pop(self.rng.randrange(len(self.urls))))

    def odd_paths(self) -> httpx.Response:
        method = self.rng.choice(("GET", "POST", "PUT", "HEAD", "PATCH", "OPTIONS", "DELETE"))
        path = self.rng.choice(
            ("/v1/completions", "/nothing", "/v1/hidden_states/..%2f..%2fx", "/v1/models/x", "/%00")
        )
        return self.http.request(method, path)


def rows_now(server: ServeProcess) -> list[torch.Tensor]:
    """Rows of both prompts."""
    prompts = [PROMPT, LONG_PROMPT]
    with server.client() as http:
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0}
        choices = http.post("/v1/completions", json=body).json()["choices"]
    files = [load_file(one["kv_transfer_params"]["hidden_states_path"]) for one in choices]
    assert [file["token_ids"].tolist() for file in files] == prompts
    return [file["hidden_states"] for file in files]


def check_rows(folder: Path, rows: list[torch.Tensor]) -> None:
    """They are those of transformers."""
    for prompt, found in zip((PROMPT, LONG_PROMPT), rows, strict=True):
        streams = reference_run(folder, prompt).streams
        for column, layer in enumerate((0, 2, 4)):
            assert relative_error(found[:, column], streams[layer]) <= 1e-4


def quiet(server: ServeProcess) -> bool:
    with server.client() as http:
        metrics = http.get("/metrics").text
    counts = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_")]
    return len(counts) >= 2 and all(float(line.split()[-1]) == 0 for line in counts)


@pytest.mark.parametrize(
    ("family", "num_requests"), [("qwen3_5", 12), at_night("qwen3_5", 250), at_night("llama", 250)]
)
def test_mixed_requests_at_once(
    family: str, num_requests: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    flags = ["--enable-hidden-states-download", "--body-timeout", "20", "--max-num-seqs", "8"]
    storage = tmp_path / "storage"
    with serve(folder, storage, *flags) as server:
        process = psutil.Process(server.process.pid)
        expected = rows_now(server)
        check_rows(folder, expected)
        attacks = [Attack(server, seed) for seed in range(6)]
        with ThreadPoolExecutor(len(attacks)) as threads:
            found = [threads.submit(attack.run, num_requests) for attack in attacks]
            statuses = sum((one.result(60 * num_requests) for one in found), Counter())
        assert statuses[200] and statuses[400]
        deadline = time.monotonic() + SECONDS
        while not quiet(server):
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.1)
        assert all(map(torch.equal, rows_now(server), expected))
        assert not [name for name in os.listdir(storage) if ".tmp" in name]
        assert process.memory_info().rss < 2 << 30
        while process.num_fds() > 60:
            assert time.monotonic() < deadline, "descriptors are left"
            time.sleep(0.1)
        assert "Traceback" not in server.log, server.log[server.log.index("Traceback") :][:3000]


class SlowReader:
    """Makes files and reads them, some so slowly, or so late, that their time is over."""

    def __init__(self, server: ServeProcess, seed: int, scratch: Path) -> None:
        self.server, self.rng, self.copy = server, random.Random(seed), scratch / f"copy-{seed}"
        self.statuses: Counter[int] = Counter()

    def run(self, num_files: int) -> Counter[int]:
        with self.server.client() as http:
            for _ in range(num_files):
                self.make_and_read(http)
        return self.statuses

    def make_and_read(self, http: httpx.Client) -> None:
        prompt = [self.rng.randrange(1, 250) for _ in range(500)]
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        self.statuses[answer.status_code] += 1
        if answer.status_code == 507:
            time.sleep(0.3)
            return
        assert answer.status_code == 200, answer.text
        time.sleep(self.rng.choice((0, 0, 0, 1.6)))
        seconds = self.rng.choice((0, 0.05, 0.1))
        with http.stream("GET", answer.json()["kv_transfer_params"]["hidden_states_url"]) as file:
            self.statuses[file.status_code] += 1
            assert file.status_code in (200, 404)
            if file.status_code == 404:
                return
            with self.copy.open("wb") as copy:
                for piece in file.iter_raw(1 << 15):
                    copy.write(piece)
                    time.sleep(seconds)
        assert list(MappedFile(str(self.copy)).problems()) == []
        tokens = load_file(self.copy)["token_ids"].tolist()
        assert tokens == prompt


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_slow_readers_with_little_room_and_time(family: str, tmp_path: Path) -> None:
    """Each file is had whole or not at all; in the end all are gone."""
    folder, storage = make_checkpoint(tmp_path / "model", family), tmp_path / "storage"
    flags = ["--enable-hidden-states-download", "--hidden-states-ttl", "1"]
    with serve(folder, storage, *flags, "--hidden-states-quota-gib", "0.003") as server:
        readers = [SlowReader(server, seed, tmp_path) for seed in range(6)]
        with ThreadPoolExecutor(len(readers)) as threads:
            found = [threads.submit(reader.run, 12) for reader in readers]
            statuses = sum((one.result(600) for one in found), Counter())
        assert statuses[200] > 12 and statuses[404] and statuses[507], statuses
        deadline = time.monotonic() + SECONDS
        while os.listdir(storage):
            assert time.monotonic() < deadline, os.listdir(storage)
            time.sleep(0.1)
        assert "Traceback" not in server.log
