"""An engine process that a signal has stopped: said in the log and by /health; and held sockets."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.gate_harness import wait_until
from tests.entrypoints.live_server import LiveServer, live_server
from vllm.utils import stop_watch
from vllm.v1.engine import core_client


def test_a_stopped_core_is_named(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stop_watch, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(core_client, "STOP_POLL_SECONDS", 0.05)
    with live_server(tiny_llama, tmp_path, layers=None) as server, server.client() as client:
        pid = server.state.engine.core_pid
        assert client.get("/health").status_code == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            assert wait_until(lambda: client.get("/health").status_code == 503)
            assert f"the engine core (process {pid}) has been stopped" in caplog.text
        finally:
            os.kill(pid, signal.SIGCONT)
        assert wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": [5]}).status_code == 200


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_work", [False, True])
def test_a_stopped_rank_is_told_by_health(has_work: bool, tiny_llama: Path, tmp_path: Path) -> None:
    """Also while the engine waits for work, and until the rank goes on; nothing is lost."""
    with (
        live_server(tiny_llama, tmp_path, layers=None, tensor_parallel_size=2) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as threads,
    ):
        body = {"prompt": [5], "temperature": 0}
        ask = partial(client.post, "/v1/completions", json=body, timeout=120)
        expected = ask().json()["choices"]
        (rank,) = psutil.Process(server.state.engine.core_pid).children()
        rank.suspend()
        try:
            answer = threads.submit(ask) if has_work else None
            assert client.get("/health").status_code == 200
            assert wait_until(lambda: client.get("/health").status_code == 503, 60)
        finally:
            rank.resume()
        assert wait_until(lambda: client.get("/health").status_code == 200)
        if answer is not None:
            assert answer.result().json()["choices"] == expected
        assert ask().json()["choices"] == expected


def test_500_held_connections(server: LiveServer) -> None:
    """Clients that connect, send half of a head and wait do not delay others."""
    with ExitStack() as stack, server.client() as client:
        for _ in range(500):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        start = time.monotonic()
        body = {"prompt": [5, 6], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert time.monotonic() - start < 10
