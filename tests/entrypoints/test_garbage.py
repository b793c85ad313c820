"""Requests leave no reference cycles: the garbage collector comes by too seldom to rely on."""

from __future__ import annotations

import collections
import gc
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.gate_harness import wait_until
from tests.entrypoints.live_server import LiveServer, live_server

PROMPT = list(range(40))
MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    *((COMPLETIONS, {"prompt": PROMPT, "stream": stream}) for stream in (False, True)),
    *((COMPLETIONS, {"prompt": [PROMPT] * 2, "stream": stream}) for stream in (False, True)),
    *((CHAT, {"messages": MESSAGES, "n": 2, "stream": stream}) for stream in (False, True)),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4000}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": "many"}),
]
ABANDONED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": prompt, "stream": stream, **LONG})
    for prompt in (PROMPT, [PROMPT] * 2)
    for stream in (False, True)
]


@pytest.fixture(scope="module")
def own_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tiny_llama, tmp_path_factory.mktemp("rows")) as running:
        yield running


def ask(server: LiveServer, path: str, body: dict[str, Any], *, to_the_end: bool) -> None:
    """On a connection of its own, with nothing but a socket: clients make cycles as well."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        if to_the_end:
            while connection.recv(2**16):
                pass
        else:
            assert wait_until(server.state.engine.output_processor.has_unfinished_requests)
    assert wait_until(lambda: not server.state.server_load)


def garbage_types(server: LiveServer) -> list[tuple[str, int]]:
    """Types and counts of objects made since the collector was off that only it could free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        server.call(gc.collect)
    finally:
        gc.set_debug(0)
    found = collections.Counter(type(one).__qualname__ for one in gc.garbage)
    gc.garbage.clear()
    return found.most_common(10)


@pytest.mark.parametrize("to_the_end", [True, False], ids=["answered", "abandoned"])
def test_no_cycles(own_server: LiveServer, to_the_end: bool) -> None:
    requests = ANSWERED if to_the_end else ABANDONED
    for path, body in requests:  # what is made once
        ask(own_server, path, body, to_the_end=to_the_end)
    own_server.num_tasks()
    gc.collect()
    gc.disable()
    try:
        for path, body in requests:
            for _ in range(3):
                ask(own_server, path, body, to_the_end=to_the_end)
            found = garbage_types(own_server)
            assert not found, f"{path} {body}: {found}"
    finally:
        gc.enable()
