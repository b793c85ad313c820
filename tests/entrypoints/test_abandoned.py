"""A client that goes away, at whatever moment, leaves no file; one that was answered keeps its own.

Requests run one after the other in the engine, so that some of a list have ended when others
have not begun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.exceptions import ExceptionMiddleware

from tests.entrypoints.gate_harness import read_response, wait_until
from tests.entrypoints.live_server import LiveServer, live_server
from vllm.entrypoints.openai.http_protocol import PromptHeadProtocol
from vllm.v1.engine.core_messages import EngineStats

PROMPTS = [list(range(start, start + 90)) for start in (5, 50, 100)]
MESSAGES = [{"role": "user", "content": "hello " * 10}]
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": ("/v1/completions", {"prompt": PROMPTS[0]}, 1),
    "prompts": ("/v1/completions", {"prompt": PROMPTS}, 3),
    "continuations": ("/v1/completions", {"prompt": PROMPTS[1], "n": 2, "seed": 1}, 2),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "seed": 1}, 2),
}
"""Path, body, number of files."""
GENERATION = {"max_tokens": 2, "ignore_eos": True}
RESET_AT_CLOSE = struct.pack("ii", 1, 0)

Moment = tuple[str, int]
"""Something that happens in the server, and how often it has happened before."""


class House:
    """A server, whose single client can be cut off at a moment of its request's life."""

    def __init__(self, server: LiveServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.connections: list[PromptHeadProtocol] = []
        self.reached: Counter[str] = Counter()
        self.cut_at: Moment | None = None
        self.client: socket.socket | None = None

    def reach(self, name: str) -> None:
        """Called by the server's thread when it has come to ``name``."""
        if self.client is not None:
            self.reached[name] += 1
            if self.cut_at == (name, self.reached[name] - 1):
                self.cut()

    def cut(self) -> None:
        """Return when the server's machine knows that the client is gone; the server does not."""
        assert self.client is not None
        self.client.close()
        self.client = None
        assert wait_until(lambda: not self.connections[-1].has_client())

    def send(self, kind: str, cut_at: Moment | None = None, **fields: Any) -> None:
        """Begin a request, on a connection of its own."""
        path, body, _ = REQUESTS[kind]
        content = json.dumps(body | GENERATION | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.reached.clear()
        self.cut_at = cut_at
        self.client = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        if cut_at is not None and cut_at[1] % 2:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        self.client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def finish(self) -> bytes:
        """The whole reply; the client then leaves."""
        client, streams = self.client, b"text/event-stream"
        assert client is not None
        with client:
            head = client.recv(2**16, socket.MSG_PEEK)
            if streams not in head:
                data = read_response(client)[2]
            else:
                data = b""
                while not data.endswith(b"\r\n0\r\n\r\n"):
                    data += client.recv(2**16)
        self.client = None
        return data

    def moments(self, kind: str, **fields: Any) -> list[Moment]:
        """All of them, in a request that nobody cuts off and whose files stay."""
        self.send(kind, **fields)
        num_named = self.finish().count(b'"hidden_states_path"')
        assert num_named > REQUESTS[kind][2]  # once at the top level, once in each choice
        self.settle()
        assert self.take_files() == 2 * REQUESTS[kind][2]  # with their locks
        few = {name: min(count, 4) for name, count in self.reached.items() if name == "step"}
        return [(name, n) for name, count in (self.reached | few).items() for n in range(count)]

    def settle(self) -> None:
        """Everything that was asked for has ended, or been aborted."""
        with self.server.client() as http:
            body = {"prompt": "x", "max_tokens": 1}
            reply = http.post("/v1/completions", json=body).raise_for_status().json()
        path = Path(reply["kv_transfer_params"]["hidden_states_path"])
        path.unlink()
        Path(f"{path}.lock").unlink()
        assert wait_until(lambda: not self.server.state.server_load)

    def take_files(self) -> int:
        """Remove all files; how many there were."""
        files = list(self.folder.iterdir())
        for file in files:
            file.unlink()
        return len(files)

    def assert_nothing_stays(self, what: object) -> None:
        self.settle()
        assert wait_until(lambda: not any(self.folder.iterdir()), 10), (
            what,
            os.listdir(self.folder),
        )


@pytest.fixture(scope="module")
def house(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("rows")
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    options["enable_prefix_caching"] = False  # so that every run of a request has the same steps
    with (
        pytest.MonkeyPatch.context() as patch,
        live_server(tiny_llama, folder, **options) as server,
    ):
        house = House(server, folder)
        _report_moments(house, patch)
        yield house


def _report_moments(house: House, patch: pytest.MonkeyPatch) -> None:
    """Let the server say where it is: from the first byte of a request to the last of its reply."""
    engine = house.server.state.engine
    run, call = engine.run, ExceptionMiddleware.__call__
    connection_made = PromptHeadProtocol.connection_made

    async def reporting_run(processed: Any) -> Any:
        house.reach("run")
        async with aclosing(run(processed)) as outputs:
            async for output in outputs:
                house.reach("output")
                yield output

    async def reporting_call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        async def reporting_send(message: Any) -> None:
            house.reach("message")
            await send(message)

        await call(self, scope, receive, reporting_send)

    def reporting_connection(self: PromptHeadProtocol, transport: Any) -> None:
        connection_made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        house.connections.append(self)

    def reporting_step(stats: EngineStats) -> None:
        if stats.num_running:
            house.reach("step")

    patch.setattr(engine, "run", reporting_run)
    patch.setattr(ExceptionMiddleware, "__call__", reporting_call)
    patch.setattr(PromptHeadProtocol, "connection_made", reporting_connection)
    engine.on_stats.append(reporting_step)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", REQUESTS)
def test_cut_off_at_every_moment(house: House, kind: str, streamed: bool) -> None:
    moments = house.moments(kind, stream=streamed)
    assert {name for name, _ in moments} == {"run", "step", "output", "message"}
    for moment in moments:
        house.send(kind, moment, stream=streamed)
        assert wait_until(lambda: house.client is None), f"{moment} was not reached"
        house.assert_nothing_stays(moment)


@pytest.mark.parametrize("kind", REQUESTS)
def test_cut_off_before_the_engine_begins(house: House, kind: str) -> None:
    engine = house.server.state.engine
    os.kill(engine.core_pid, signal.SIGSTOP)
    try:
        house.send(kind)
        assert wait_until(lambda: house.reached["run"] > 0)
        assert wait_until(engine.output_processor.has_unfinished_requests)
        house.cut()
        assert wait_until(lambda: not house.server.state.server_load)
    finally:
        os.kill(engine.core_pid, signal.SIGCONT)
    house.assert_nothing_stays(kind)


def test_cut_off_in_the_middle_of_the_body(house: House) -> None:
    with socket.create_connection(("127.0.0.1", house.server.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    house.assert_nothing_stays("body")


@pytest.mark.parametrize(
    "leave", [House.cut, House.finish, lambda house: None], ids=["cut", "read", "never read"]
)
def test_a_reply_that_is_larger_than_the_sockets(
    house: House, leave: Callable[[House], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is delivered when the last of it has left this process, not when it is written."""
    house.send("prompts", prompt_logprobs=20, return_token_ids=True)
    assert wait_until(lambda: house.reached["message"] == 2)
    transport = house.connections[-1].transport
    assert house.server.call(transport.get_write_buffer_size) > 0
    assert house.server.state.server_load == 1
    assert len(list(house.folder.iterdir())) == 6
    leave(house)
    if leave is House.finish:
        house.settle()
        assert house.take_files() == 6
        return
    if house.client is not None:
        assert house.server.state.server_load == 1
        house.cut()
    house.assert_nothing_stays(leave)


def test_a_reply_that_waits_in_the_socket_is_delivered(house: House) -> None:
    house.send("prompts")
    assert wait_until(lambda: house.reached["message"] == 2)
    house.settle()
    house.cut()
    house.settle()
    assert house.take_files() == 6
