"""The gate before the endpoints, from outside: raw sockets and httpx against uvicorn."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.entrypoints.gate_harness import (
    Gate,
    GateState,
    error_of,
    gate,
    read_response,
    wait_until,
)
from vllm.entrypoints.openai import http_protocol, limits
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import ServerSettings

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def post(server: Gate, content: bytes = b"{}", **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=20)


def get(server: Gate, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=20)


def test_keys() -> None:
    with gate(api_key=["first", "second"]) as server:
        assert get(server, "/load").status_code == 200
        for bad in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
            refused = get(server, "/v1/models", **bad)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            error = error_of(refused.content)
            assert (error["type"], error["code"]) == ("AuthenticationError", 401)
        assert get(server, "/v1/models", authorization="Bearer second").status_code == 200
        assert get(server, "/v1/models", authorization="bearer  first").status_code == 200
        assert post(server, authorization="Bearer fir").status_code == 401
        # Refusals reach web pages too, and preflights need no key.
        refused = get(server, "/v1/models", origin="http://page")
        assert refused.headers["access-control-allow-origin"] == "*"
        asked = {"origin": "http://page", "access-control-request-method": "POST"}
        assert httpx.options(f"{server.url}/v1/models", headers=asked).status_code == 200
    with gate() as server:
        assert get(server, "/v1/models", authorization="Bearer EMPTY").status_code == 200
        assert get(server, "/v1/models", authorization="nonsense").status_code == 200


def test_cors_origins() -> None:
    with gate(allowed_origins=["http://good"], allow_credentials=True) as server:
        good = get(server, "/load", origin="http://good")
        assert good.headers["access-control-allow-origin"] == "http://good"
        assert good.headers["access-control-allow-credentials"] == "true"
        bad = get(server, "/load", origin="http://bad")
        assert "access-control-allow-origin" not in bad.headers


def test_the_path_of_a_proxy() -> None:
    """Requests may carry it or not."""
    settings: dict[str, Any] = {"root_path": "/proxy", "api_key": ["key"]}
    with gate(build_app, GateState(ServerSettings(**settings)), **settings) as server:
        for prefix, status in (("", 200), ("/proxy", 200), ("/proxy2", 401)):
            assert get(server, f"{prefix}/version").status_code == status
            assert get(server, f"{prefix}/v1/models/x").status_code == 401
            found = get(server, f"{prefix}/v1/models/x", authorization="Bearer key")
            assert ("does not exist" in found.text) == (status == 200)
        page = httpx.get(f"{server.url}/proxy", follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/proxy/")
        described = get(server, "/proxy/openapi.json").json()
        assert described["servers"] == [{"url": "/proxy"}]


@pytest.mark.parametrize("root_path", ["", "/proxy"])
def test_bodies_up_to_the_limit(root_path: str) -> None:
    with gate(max_body_bytes=1000, root_path=root_path) as server:
        assert post(server, b'{"a": 1}'.ljust(1000)).status_code == 200
        assert post(server, b'{"a": 1}'.ljust(1001)).status_code == 413
        assert server.state.received == [1000]
        assert wait_until(lambda: server.state.server_load == 0)


def test_a_huge_body_is_refused_while_it_is_sent() -> None:
    with gate(max_body_bytes=1000) as server:
        response = post(server, b"x" * (100 << 20))
        assert response.status_code == 413
        error = error_of(response.content)
        assert error["type"] == "RequestTooLargeError"
        assert "--max-body-bytes" in error["message"]
        assert not server.state.received

        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        with server.connect() as connection:
            connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n" + chunk)
            status, headers, content = read_response(connection)
            assert (status, headers["connection"]) == (413, "close")
            assert error_of(content)["code"] == 413
            connection.sendall(chunk * 10 + b"0\r\n\r\n")
            assert connection.recv(1) == b"", "the connection ends with the body"
        assert not server.state.received
        assert server.state.metrics.responses[413] == 2


def test_a_client_that_asks_first_is_told_at_once() -> None:
    with gate(max_body_bytes=1000) as server:
        head = POST + b"content-length: 5000\r\nexpect: 100-continue\r\n\r\n"
        status, headers, _ = server.exchange(head)
        assert (status, headers["connection"]) == (413, "close")


def test_a_refused_body_is_thrown_away_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.2)
    with gate(max_body_bytes=10) as server, server.connect() as connection:
        connection.sendall(POST + b"content-length: 5000\r\n\r\nbegun")
        assert read_response(connection)[0] == 413
        assert connection.recv(1) == b"", "hung up on"


def test_slow_bodies_and_slow_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    with gate(body_timeout=0.3) as server:
        status, _, content = server.exchange(POST + b"content-length: 9\r\n\r\n{")
        assert status == 408
        error = error_of(content)
        assert (error["type"], error["code"]) == ("RequestTimeoutError", 408)
        assert "--body-timeout" in error["message"]
        assert wait_until(lambda: server.state.server_load == 0)

        status, _, content = server.exchange(POST)  # the head goes on for ever
        assert status == 408
        assert error_of(content)["code"] == 408
        with server.connect() as connection:  # nothing is ever sent
            assert connection.recv(1) == b""
        # A client in time is not disturbed, however long its answer takes.
        assert post(server, b'{"seconds": 0.7}').status_code == 200


def endless(server: Gate, start: bytes, num_bytes: int) -> tuple[int, float]:
    """(status, seconds) of a request whose head goes on and on."""
    started, piece, num_sent = time.monotonic(), b"x" * 65536, 0
    with server.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(start)
            while num_sent < num_bytes:
                connection.sendall(piece)
                num_sent += len(piece)
        with suppress(ConnectionError):
            status, _, content = read_response(connection)
            assert error_of(content)["code"] == status
            assert "--max-head-bytes" in error_of(content)["message"]
            return status, time.monotonic() - started
    return 0, time.monotonic() - started


def test_endless_heads_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []
    feed = HttpToolsProtocol.data_received
    monkeypatch.setattr(
        HttpToolsProtocol,
        "data_received",
        lambda self, data: (received.append(len(data)), feed(self, data))[1],
    )
    head = b"GET /load HTTP/1.1\r\nhost: x\r\n"
    with gate(max_head_bytes=5000) as server:
        for start, status in (
            (b"GET /", 414),
            (b"GET /load?", 414),
            (b"GET /load HTTP/1.1\r\nx: ", 431),
            (b"GET /load HTTP/1.1\r\n" + b"a: b\r\n" * 2000, 431),
            (head + b"\r\n" + head + b"x: ", 200),  # the second one on a connection
        ):
            received.clear()
            found, _ = endless(server, start, 4 << 20) if status != 200 else (200, 0)
            if status == 200:
                with server.connect() as connection:
                    connection.sendall(start + b"y" * 10_000)
                    assert read_response(connection)[0] == 200
                    assert read_response(connection)[0] == 431
            assert found in (status, 0), start  # 0: the answer was lost in what we still sent
            assert sum(received) <= 3 * 5000, "the parser keeps what it gets"
        fits = b"x-long: " + b"y" * 4000
        assert server.exchange(head + fits + b"\r\nconnection: close\r\n\r\n")[0] == 200
        # Trailers are headers, too; a body is none.
        body = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        trailers = b"t: " + b"z" * 3000 + b"\r\n"
        with server.connect() as connection:
            connection.sendall(body + trailers * 3)
            assert read_response(connection)[0] == 431
        long_body = b'{"text": "' + b"x" * 100_000 + b'"}'
        assert post(server, long_body).status_code == 200


def test_strangers_share_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waits longest is hung up on; who completes a head is no stranger any more."""
    monkeypatch.setattr(http_protocol, "STRANGERS_BYTES", 40 * http_protocol.CONNECTION_BYTES)
    with gate() as server, ExitStack() as stack:
        served = stack.enter_context(server.connect())
        served.sendall(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_response(served)[0] == 200
        waiting = [stack.enter_context(server.connect()) for _ in range(60)]
        assert all(one.recv(1) == b"" for one in waiting[:20])
        for one in waiting[30:]:
            with suppress(ConnectionError):
                one.sendall(b"GET /load HTTP/1.1\r\nx: " + b"y" * 60_000)
        assert get(server, "/load").status_code == 200
        served.sendall(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_response(served)[0] == 200
        strangers = http_protocol.PromptHeadProtocol._strangers
        assert sum(strangers.values()) <= http_protocol.STRANGERS_BYTES
    assert wait_until(lambda: not http_protocol.PromptHeadProtocol._strangers)


def test_a_full_server_turns_away_and_recovers() -> None:
    with gate(max_queued_requests=2) as server:
        slow = [threading.Thread(target=post, args=(server, b'{"seconds": 1}')) for _ in range(2)]
        for thread in slow:
            thread.start()
        assert wait_until(lambda: server.state.server_load == 2)
        refused = post(server)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused.content)["type"] == "RateLimitError"
        assert get(server, "/load").json() == {"server_load": 2}
        assert get(server, "/v1/models").status_code == 200
        for thread in slow:
            thread.join()
        assert wait_until(lambda: server.state.server_load == 0)
        assert post(server).status_code == 200


def test_a_draining_server() -> None:
    with gate() as server, server.connect() as connection:
        body = b'{"seconds": 0.5}'
        connection.sendall(POST + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        assert wait_until(lambda: server.state.server_load == 1)
        server.state.is_draining = True
        refused = post(server)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused.content)["type"] == "ServiceUnavailableError"
        assert get(server, "/v1/models").status_code == 503
        assert get(server, "/load").status_code == 200
        assert read_response(connection)[0] == 200


def test_time_of_a_generation() -> None:
    with gate(request_timeout=0.3) as server:
        assert post(server).status_code == 200
        late = post(server, b'{"seconds": 60}')
        assert late.status_code == 504
        error = error_of(late.content)
        assert (error["type"], error["code"]) == ("GenerationTimeoutError", 504)
        assert wait_until(lambda: server.state.cancelled == 1)

        late = post(server, b'{"stream": true, "seconds": 0.1}')
        assert late.status_code == 200
        *events, last = late.text.strip().split("\n\n")
        assert events[0] == "data: {}"
        assert error_of(last.removeprefix("data: ").encode())["code"] == 504
        assert wait_until(lambda: server.state.cancelled == 2)
        assert wait_until(lambda: server.state.server_load == 0)


def test_clients_that_leave() -> None:
    """Their requests stop being counted, wherever they left."""
    with gate() as server:
        for rest in (b"", b"{", b'{"seconds": 0}'):
            with server.connect() as connection:
                connection.sendall(POST + b"content-length: 14\r\n\r\n" + rest)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        assert wait_until(lambda: server.state.server_load == 0)
        assert post(server).status_code == 200


def test_answers_are_counted() -> None:
    with gate() as server:
        assert get(server, "/nowhere").json() == {"detail": "Not Found"}
        assert get(server, "/v1/completions").status_code == 405
        assert httpx.post(f"{server.url}/broken").status_code == 500
        assert post(server).status_code == 200
        assert dict(server.state.metrics.responses) == {404: 1, 405: 1, 500: 1, 200: 1}


def test_the_gate_costs_little() -> None:
    """Many small requests over one connection; bytes come back whole."""
    with gate() as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for number in range(200):
            answer = client.post("/v1/completions", content=json.dumps({"n": number}))
            assert answer.json() == {"ok": True}
        assert len(server.state.received) == 200
