"""Streams: their chunks, and what becomes of them when a client goes away."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.harness import greedy
from tests.entrypoints.live_server import LiveServer, serve_state
from tests.entrypoints.stub_engine import StubEngine, fail, say
from tests.entrypoints.test_chat import join_calls
from tests.models.checkpoints import NUM_BYTES
from vllm import LLM
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.server_metrics import ServerMetrics
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import Failure, FailureKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_messages import EngineStats

GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WAIT_SECONDS = 10.0
END_OF_TURN = NUM_BYTES + 2


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the [DONE] that ends it."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_a_completion_stream_adds_up_to_the_answer(http: httpx.Client, reference: LLM) -> None:
    wanted = reference.generate("stream me", greedy(8, logprobs=1), use_tqdm=False)[0].outputs[0]
    body = {"prompt": "stream me", "max_tokens": 8, "logprobs": 1, "return_token_ids": True}
    chunks = events(http, "/v1/completions", body | GREEDY)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == wanted.text
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == list(wanted.token_ids)
    assert choices[0]["prompt_token_ids"] is not None
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    expected = [row[token].logprob for row, token in zip(wanted.logprobs, ids, strict=True)]
    assert logprobs == pytest.approx(expected, abs=1e-6)
    whole = http.post("/v1/completions", json=body | GREEDY | {"stream": False}).json()
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert {"id", "object", "created", "model", "choices"} <= set(chunks[0])
    assert set(choices[0]) == {
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids"),
        "token_ids",
    }
    assert "system_fingerprint" in chunks[-1] and "system_fingerprint" not in chunks[0]


def test_a_stream_of_several_prompts_and_continuations(http: httpx.Client) -> None:
    body = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 5, "seed": 1, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()
    options = {"include_usage": True}
    chunks = events(http, "/v1/completions", body | {"stream": True, "stream_options": options})
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [texts[index] for index in range(4)] == [one["text"] for one in whole["choices"]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "stream_options": {
        "include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    chunks = events(http, "/v1/chat/completions", body | GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts)
    prompt = chunks[0]["usage"]["prompt_tokens"]
    assert all(chunk["usage"]["total_tokens"] == prompt + count
               for chunk, count in zip(chunks, counts, strict=True))  # fmt: skip


def test_a_chat_stream_begins_with_the_role(http: httpx.Client, reference: LLM) -> None:
    wanted = reference.chat(HELLO, greedy(6), use_tqdm=False)[0]
    body = {"messages": HELLO, "max_tokens": 6, "return_token_ids": True}
    chunks = events(http, "/v1/chat/completions", body | GREEDY)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == wanted.prompt_token_ids
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks[1:]]
    assert "".join(choice["delta"]["content"] for choice in choices) == wanted.outputs[0].text
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == list(wanted.outputs[0].token_ids)
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
    assert "usage" not in chunks[0] and "system_fingerprint" in chunks[-1]


def test_the_openai_client_reads_streams(client: openai.OpenAI, reference: LLM) -> None:
    wanted = reference.chat(HELLO, greedy(6), use_tqdm=False)[0].outputs[0]
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == wanted.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


class StubServer:
    """A server around an engine that says what a test tells it to."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.engine: StubEngine = server.state.engine

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.server.call(condition):
            assert time.monotonic() < deadline, "it did not happen"

    def tokens(self, text: str) -> list[int]:
        return self.engine.get_tokenizer().encode(text, add_special_tokens=False, verbose=False)


@pytest.fixture
def stub(tiny_llama: Path, tmp_path: Path) -> Iterator[StubServer]:
    settings = ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes")

    async def make_state() -> ServerState:
        engine = StubEngine(tiny_llama, tmp_path, lambda request_id: say(request_id, [[64]]))
        metrics = ServerMetrics(EngineStats, "stub")
        return ServerState(engine, settings, ["stub"], metrics=metrics)

    with serve_state(make_state) as server:
        yield StubServer(server)


def test_tool_calls(stub: StubServer) -> None:
    text = 'Look: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    steps = [[token] for token in [*stub.tokens(text), END_OF_TURN]]
    stub.engine.script = lambda request_id: say(request_id, steps)
    body = {"messages": HELLO, "tools": [TOOL]}
    with stub.server.openai() as client:
        answer = client.chat.completions.create(model="stub", messages=HELLO, tools=[TOOL])  # type: ignore[arg-type, list-item]
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look:")
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    with stub.server.client() as http:
        chunks = events(http, "/v1/chat/completions", body | {"stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas).strip() == "Look:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert join_calls(calls) == [("f", '{"x": 1}')]
        assert len(calls) > 5, "in pieces"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        plain = http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).json()
        assert plain["choices"][0]["message"]["content"] == text
    with (
        stub.server.openai() as client,
        client.chat.completions.stream(
            model="stub",
            messages=HELLO,
            tools=[TOOL],  # type: ignore[arg-type, list-item]
        ) as stream,
    ):
        kinds = [event.type for event in stream]
        assert kinds.count("tool_calls.function.arguments.delta") > 3
        final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        (streamed,) = final.message.tool_calls or []
        assert streamed.function.name == "f"
        assert json.loads(streamed.function.arguments) == {"x": 1}
    with stub.server.client() as http:
        for choice in ({"type": "function", "function": {"name": "f"}}, {}, "", "required"):
            for tools in ([TOOL], [], None):
                forced = body | {"tool_choice": choice, "tools": tools}
                assert http.post("/v1/chat/completions", json=forced).status_code == 400


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_a_client_may_want_one_tool_call(
    stub: StubServer, parallel: bool | None, count: int
) -> None:
    text = "".join(
        f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2)
    )
    steps = [[token] for token in [*stub.tokens(text), END_OF_TURN]]
    stub.engine.script = lambda request_id: say(request_id, steps)
    body = {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": parallel}
    expected = [("f", '{"x": 1}'), ("f", '{"x": 2}')][:count]
    with stub.server.client() as http:
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(one["name"], one["arguments"]) for one in functions] == expected
        chunks = events(http, "/v1/chat/completions", body | {"stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert join_calls(calls) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tags_of_tool_calls_may_be_special_tokens(stub: StubServer) -> None:
    """As in the tokenizers of Hermes' Llama models; texts are without special tokens otherwise."""
    tokenizer: Any = stub.engine.get_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    text = 'Look: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    steps = [[token] for token in [*stub.tokens(text), END_OF_TURN]]
    stub.engine.script = lambda request_id: say(request_id, steps)
    body = {"messages": HELLO, "tools": [TOOL]}
    with stub.server.client() as http:
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Look:")
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
        chunks = events(http, "/v1/chat/completions", body | {"stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert join_calls(calls) == [("f", '{"x": 1}')]
        plain = http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).json()
        assert "<tool_call>" not in plain["choices"][0]["message"]["content"]


def test_an_echo_that_is_aborted_before_its_prompt_is_computed(stub: StubServer) -> None:
    """The log-probabilities of its prompt have not come, and are null."""
    aborted = {"finish_reason": FinishReason.ABORT}
    stub.engine.script = lambda request_id: say(request_id, [[]], **aborted)
    body = {"prompt": ["abc", "de"], "n": 2, "echo": True, "logprobs": 1, "temperature": 1}
    with stub.server.client() as http:
        for options in ({}, {"stream": True}):
            if options:
                chunks = events(http, "/v1/completions", body | options)
                choices = [choice for chunk in chunks for choice in chunk["choices"]]
            else:
                choices = http.post("/v1/completions", json=body).json()["choices"]
            texts = [(one["text"], one["finish_reason"]) for one in choices]
            assert sorted(texts) == [("abc", "abort")] * 2 + [("de", "abort")] * 2
            for one in choices:
                assert "".join(one["logprobs"]["tokens"]) == one["text"]
                assert one["logprobs"]["token_logprobs"] == [None] * len(one["text"])


@pytest.mark.parametrize(
    ("kind", "reason", "status"),
    [
        (FailureKind.ROWS_NOT_FINITE, "rows are not finite", 500),
        (FailureKind.DISK_FULL, "x cannot be written: No space left on device", 507),
        (FailureKind.STEP_FAILED, "x cannot be written: No space left on device", 500),
    ],
)
def test_a_request_that_fails_says_why(
    stub: StubServer, kind: FailureKind, reason: str, status: int
) -> None:
    stub.engine.script = lambda request_id: fail(request_id, [[64], [65]], Failure(kind, reason))
    with stub.server.client() as http:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", {"messages": HELLO, "n": 2}),
        ):
            response = http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, status)
            assert (error["type"], error["message"]) == ("InternalServerError", reason)
            streamed = events(http, path, body | {"stream": True})
            assert streamed[-1]["error"]["message"] == reason
            assert streamed[0]["choices"]
    assert not stub.engine.running


def test_files_of_a_request_that_fails_in_part_are_removed(
    stub: StubServer, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.safetensors", "a.safetensors.lock")]
    for file in files:
        file.write_text("x")
    params = {"hidden_states_path": str(files[0])}

    def script(request_id: str) -> Any:
        if "-0-" in request_id:
            return say(request_id, [[64]], kv_transfer_params=params)
        return fail(request_id, [[64]] * 5, Failure(FailureKind.STEP_FAILED, "broken"))

    stub.engine.script = script
    with stub.server.client() as http:
        assert http.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 500
    assert not any(file.exists() for file in files)


def test_http_1_0_gets_no_chunks(stub: StubServer) -> None:
    """Proxies such as nginx speak it by default: the end of the connection ends the body."""
    stub.engine.script = lambda request_id: say(request_id, [[64], [65], [66]])

    def reply(version: str, streamed: bool) -> tuple[bytes, bytes]:
        content = json.dumps({"prompt": "a", "stream": streamed}).encode()
        head = (
            f"POST /v1/completions HTTP/{version}\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", stub.server.port), WAIT_SECONDS) as raw:
            raw.sendall(head.encode() + content)
            parts = iter(lambda: raw.recv(2**16), b"")
            got, _, body = b"".join(parts).partition(b"\r\n\r\n")
        return got.lower(), body

    head, body = reply("1.0", streamed=True)
    assert b"200 ok" in head and b"connection: close" in head
    assert b"transfer-encoding" not in head
    blocks = body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in blocks[:-2]]
    assert len(texts) == 3
    assert b"transfer-encoding: chunked" in reply("1.1", streamed=True)[0]
    head, body = reply("1.0", streamed=False)
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["choices"][0]["text"] == "".join(texts)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_goes_away_aborts_its_request(
    stub: StubServer, streamed: bool, prompt: Any
) -> None:
    idle_tasks = stub.server.num_tasks()
    stub.server.call(stub.engine.gate.clear)
    stub.engine.script = lambda request_id: say(request_id, [[64]] * 5)
    content = json.dumps({"prompt": prompt, "stream": streamed}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    num_prompts = len(prompt)
    with socket.create_connection(("127.0.0.1", stub.server.port)) as raw:
        raw.sendall(head.encode() + content)
        stub.wait_until(lambda: len(stub.engine.running) == num_prompts)
        if streamed:
            assert b"200 OK" in raw.recv(100)
    stub.wait_until(lambda: len(stub.engine.abandoned) == num_prompts)
    assert not stub.engine.running
    stub.wait_until(lambda: not stub.server.state.server_load)
    deadline = time.monotonic() + WAIT_SECONDS
    while stub.server.num_tasks() > idle_tasks:
        assert time.monotonic() < deadline, "a task was left behind"
