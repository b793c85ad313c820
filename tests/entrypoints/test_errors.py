"""Clients get the right answer to every mistake they can make."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.entrypoints.live_server import LiveServer, live_server
from tests.models.checkpoints import VOCAB_SIZE
from vllm.entrypoints.openai.errors import hide_local_paths
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

CONTEXT = 512
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEMANTIC, FORM = "BadRequestError", "Bad Request"
HELLO = [{"role": "user", "content": "hello"}]
OK = {"prompt": [5, 6, 7], "max_tokens": 1}
CHAT_OK = {"messages": HELLO, "max_tokens": 1}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def prompt(value: Any) -> dict[str, Any]:
    return {"prompt": value, "max_tokens": 1}


MISTAKES: list[tuple[str, str, dict[str, Any], str, str | None]] = [
    ("context", COMPLETIONS, prompt([1] * (CONTEXT + 1)), SEMANTIC, "input_tokens"),
    ("full", COMPLETIONS, prompt([1] * CONTEXT), SEMANTIC, "max_tokens"),
    ("no token", COMPLETIONS, OK | {"max_tokens": 0}, SEMANTIC, "max_tokens"),
    ("minus one", COMPLETIONS, OK | {"max_tokens": -1}, SEMANTIC, "max_tokens"),
    ("many", COMPLETIONS, OK | {"max_tokens": CONTEXT + 1}, SEMANTIC, "max_tokens"),
    ("many", CHAT, CHAT_OK | {"max_completion_tokens": 513}, SEMANTIC, "max_tokens"),
    (
        "cut above",
        COMPLETIONS,
        OK | {"truncate_prompt_tokens": CONTEXT + 1},
        SEMANTIC,
        "truncate_prompt_tokens",
    ),
    (
        "cut below",
        COMPLETIONS,
        OK | {"truncate_prompt_tokens": -2},
        FORM,
        "body.truncate_prompt_tokens",
    ),
    (
        "cut to 0",
        COMPLETIONS,
        OK | {"truncate_prompt_tokens": 0},
        SEMANTIC,
        "truncate_prompt_tokens",
    ),
    ("empty", COMPLETIONS, prompt(""), SEMANTIC, "prompt"),
    ("null", COMPLETIONS, prompt(None), SEMANTIC, "prompt"),
    ("absent", COMPLETIONS, {"max_tokens": 1}, SEMANTIC, "prompt"),
    ("no ids", COMPLETIONS, prompt([]), SEMANTIC, None),
    ("no ids in list", COMPLETIONS, prompt([[]]), SEMANTIC, None),
    ("empty in list", COMPLETIONS, prompt(["a", ""]), SEMANTIC, None),
    ("number", COMPLETIONS, prompt(5), FORM, "body.prompt"),
    ("object", COMPLETIONS, prompt({}), FORM, "body.prompt"),
    ("mixed", COMPLETIONS, prompt([1, "a"]), FORM, "body.prompt.1"),
    ("negative", COMPLETIONS, prompt([9, -5]), FORM, "body.prompt.1"),
    ("fraction", COMPLETIONS, prompt([1.5, 2]), FORM, "body.prompt.0"),
    ("in a list", COMPLETIONS, prompt([[1], [2, True]]), FORM, "body.prompt.1.1"),
    ("unknown id", COMPLETIONS, prompt([1, VOCAB_SIZE]), SEMANTIC, None),
    ("huge id", COMPLETIONS, prompt([10**30]), SEMANTIC, None),
    ("hot", COMPLETIONS, OK | {"temperature": "hot"}, FORM, "body.temperature"),
    ("cold", COMPLETIONS, OK | {"temperature": -1}, SEMANTIC, "temperature"),
    ("too hot", COMPLETIONS, OK | {"temperature": 100}, SEMANTIC, "temperature"),
    ("top_p 0", COMPLETIONS, OK | {"top_p": 0}, SEMANTIC, "top_p"),
    ("top_p 2", COMPLETIONS, OK | {"top_p": 2}, SEMANTIC, "top_p"),
    ("top_k", COMPLETIONS, OK | {"top_k": -5}, SEMANTIC, None),
    ("n 0", COMPLETIONS, OK | {"n": 0}, SEMANTIC, None),
    ("n 2 greedy", COMPLETIONS, OK | {"n": 2, "temperature": 0}, SEMANTIC, None),
    ("n too many", COMPLETIONS, OK | {"n": 10**9}, FORM, "body.n"),
    ("stop", COMPLETIONS, OK | {"stop": [""]}, SEMANTIC, None),
    ("stop", COMPLETIONS, OK | {"stop": ["a", 1]}, FORM, "body.stop.1"),
    ("logprobs", COMPLETIONS, OK | {"logprobs": 21}, SEMANTIC, "logprobs"),
    ("logprobs", COMPLETIONS, OK | {"logprobs": -1}, SEMANTIC, "logprobs"),
    ("top", CHAT, CHAT_OK | {"logprobs": True, "top_logprobs": 21}, SEMANTIC, "top_logprobs"),
    ("top alone", CHAT, CHAT_OK | {"top_logprobs": 2}, SEMANTIC, "top_logprobs"),
    ("options", COMPLETIONS, OK | {"stream_options": {}}, SEMANTIC, "stream_options"),
    ("suffix", COMPLETIONS, OK | {"suffix": "x"}, SEMANTIC, "suffix"),
    ("min_p", COMPLETIONS, OK | {"min_p": 0.1}, SEMANTIC, None),
    ("bias", COMPLETIONS, OK | {"logit_bias": {"5": 1.0}}, SEMANTIC, None),
    (
        "schema",
        CHAT,
        CHAT_OK | {"structured_outputs": {"json": {"type": "object"}}},
        SEMANTIC,
        None,
    ),
    ("beams", COMPLETIONS, OK | {"use_beam_search": True}, SEMANTIC, None),
    ("format", CHAT, CHAT_OK | {"response_format": {"type": "json_object"}}, SEMANTIC, None),
    ("no format", CHAT, CHAT_OK | {"response_format": {}}, SEMANTIC, None),
    ("transfer", COMPLETIONS, OK | {"kv_transfer_params": "abc"}, FORM, "body.kv_transfer_params"),
    ("transfer", COMPLETIONS, OK | {"kv_transfer_params": {"a": 10**40}}, SEMANTIC, None),
    ("no messages", CHAT, {"max_tokens": 1}, FORM, "body.messages"),
    ("no message", CHAT, CHAT_OK | {"messages": []}, SEMANTIC, None),
    ("no role", CHAT, CHAT_OK | {"messages": [{"content": "x"}]}, FORM, "body.messages.0.role"),
    (
        "content",
        CHAT,
        CHAT_OK | {"messages": [{"role": "user", "content": 5}]},
        FORM,
        "body.messages.0.content",
    ),
    (
        "both",
        CHAT,
        CHAT_OK | {"continue_final_message": True, "add_generation_prompt": True},
        SEMANTIC,
        None,
    ),
    ("template", CHAT, CHAT_OK | {"chat_template": "x"}, SEMANTIC, None),
    (
        "variables",
        CHAT,
        CHAT_OK | {"chat_template_kwargs": {"tokenize": True}},
        SEMANTIC,
        None,
    ),
    ("image", CHAT, CHAT_OK | {"messages": [{"role": "user", "content": IMAGE}]}, SEMANTIC, None),
    ("tools", CHAT, CHAT_OK | {"tools": [TOOL]}, SEMANTIC, None),
    ("tools", CHAT + "/render", CHAT_OK | {"tools": [TOOL]}, SEMANTIC, None),
    ("render", COMPLETIONS + "/render", prompt([1] * CONTEXT), SEMANTIC, "max_tokens"),
    (
        "render cut",
        COMPLETIONS + "/render",
        {"prompt": [1] * 600, "truncate_prompt_tokens": CONTEXT},
        SEMANTIC,
        "max_tokens",
    ),
    ("nothing", "/tokenize", {}, FORM, "body.prompt"),
    ("no id", "/detokenize", {"tokens": [-1]}, FORM, "body.tokens.0"),
    ("absent", "/detokenize", {}, FORM, "body.tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "kind", "param"),
    [mistake[1:] for mistake in MISTAKES],
    ids=[f"{mistake[1].rsplit('/')[-1]}-{mistake[0]}" for mistake in MISTAKES],
)
def test_a_mistake_is_a_400_that_says_where_it_is(
    http: httpx.Client, path: str, body: dict[str, Any], kind: str, param: str | None
) -> None:
    for streamed in (False, True) if path in (COMPLETIONS, CHAT) else (False,):
        if streamed and "stream_options" in body:
            continue
        response = http.post(path, json=body | ({"stream": True} if streamed else {}))
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"], error["code"]) == (kind, param, 400), error
        if kind == FORM:
            assert error["message"].startswith("1 validation error(s):")


def test_words_that_clients_look_for(http: httpx.Client) -> None:
    def message(path: str, body: dict[str, Any]) -> str:
        return str(http.post(path, json=body).json()["error"]["message"])

    too_long = message(COMPLETIONS, prompt([1] * 600))
    assert too_long.startswith("This model's maximum context length is 512 tokens")
    assert message(COMPLETIONS, OK | {"max_tokens": -1}) == "max_tokens must be at least 1, got -1"
    assert message(COMPLETIONS, prompt([1] * CONTEXT)).startswith(
        "max_tokens must be at least 1, got 0"
    )
    assert message(COMPLETIONS, prompt([1, 307])).startswith("Token id 307 is out of vocabulary")
    several = message(COMPLETIONS, {"prompt": 5, "temperature": "hot", "top_p": []})
    assert several.startswith("3 validation error(s):") and "body.temperature" in several


def test_a_text_that_is_certainly_too_long_is_not_tokenised(http: httpx.Client) -> None:
    text = "x" * 2_000_000
    conversation = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    for path, body in ((COMPLETIONS, OK | {"prompt": text}), (CHAT, conversation)):
        response = http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "input_tokens")
        assert error["message"].startswith("This model's maximum context length is 512 tokens")
        assert " characters, which are more tokens than" in error["message"]
        assert http.post(path, json=body | {"truncate_prompt_tokens": 9}).status_code == 200
    assert http.post("/tokenize", json=conversation).json()["count"] > 512


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, CHAT + "/render", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_a_404(http: httpx.Client, path: str) -> None:
    body = {"model": "x", "prompt": "a", "messages": HELLO, "tokens": [1]}
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert error["message"].startswith("The model `x` does not exist")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": ', "body.11"),
        (b"{]", "body.1"),
        (b"", "body"),
        (b"[1, 2]", "body"),
        (b'"text"', "body"),
        (b'{"prompt": "\xff\xfe"}', "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "body"),
        (b"[" * 100_000, "body"),
    ],
    ids=["cut", "wrong", "empty", "list", "string", "utf-8", "surrogate", "deep", "deeper"],
)
def test_bodies_that_are_no_request(http: httpx.Client, content: bytes, param: str) -> None:
    headers = {"content-type": "application/json"}
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        response = http.post(path, content=content, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, FORM, param)


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", "", "json"])
def test_other_content_types_are_refused(http: httpx.Client, content_type: str) -> None:
    content = json.dumps(OK)
    response = http.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, FORM, None)
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post(COMPLETIONS, content=content, headers=headers).status_code == 200


def test_bodies_that_are_not_read_as_sent(http: httpx.Client) -> None:
    """Java's client asks for HTTP/2 unless told otherwise; the parser then drops the body."""
    upgrade = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAM"}
    for headers, what in (
        (upgrade, "Upgrade: 'h2c': has to be left out of a request with a body"),
        ({"content-encoding": "gzip"}, "Content-Encoding is 'gzip': send the body as it is"),
    ):
        response = http.post(COMPLETIONS, json=OK, headers=headers)
        assert response.status_code == 400
        assert re.search(what, response.json()["error"]["message"])
    assert http.post(COMPLETIONS, json=OK, headers={"content-encoding": "identity"}).is_success
    assert http.get("/v1/models", headers=upgrade).is_success


@pytest.mark.parametrize(
    "extra",
    [
        {"best_of": 3, "no_such_field": {"x": [1]}, "user": "me"},
        {"kv_transfer_params": {"nonsense": [1, {"a": None}], "include_output_tokens": False}},
        {"top_k": 2**62},
        {"min_p": 0.0, "logit_bias": {}, "suffix": ""},
        {"n": None, "temperature": None, "stop": None, "stream": None, "stream_options": None},
        {"model": None},
        {"model": "also-tiny"},
    ],
)
def test_what_is_no_mistake(http: httpx.Client, extra: dict[str, Any]) -> None:
    response = http.post(COMPLETIONS, json=OK | extra)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "tiny"


def test_any_role_and_any_field_of_a_message_will_do(http: httpx.Client) -> None:
    messages = [
        {"role": "wizard", "content": "x", "colour": "green"},
        {"role": "user"},
        {"role": "assistant", "content": None, "thinking": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    response = http.post(CHAT, json=CHAT_OK | {"messages": messages})
    assert response.status_code == 200, response.text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3), st.booleans())
def test_no_value_of_any_field_breaks_the_server(
    http: httpx.Client, fields: dict[str, Any], is_chat: bool
) -> None:
    path, body = (CHAT, CHAT_OK) if is_chat else (COMPLETIONS, OK)
    content = json.dumps(body | fields).encode()  # NaN and lone surrogates included
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (fields, response.text)


def test_unknown_fields_are_logged_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert http.post(COMPLETIONS, json=OK | {"only_this_test": 1}).status_code == 200
    assert caplog.text.count("only_this_test") == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", COMPLETIONS),
        ("DELETE", CHAT),
        ("GET", "/tokenize"),
        ("POST", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", "/version"),
        ("POST", "/health"),
        ("GET", CHAT + "/render"),
    ],
)
def test_wrong_methods(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    if method != "HEAD":
        assert response.json() == {"detail": "Method Not Allowed"}


def test_unknown_paths(http: httpx.Client) -> None:
    for path in ("/v1/nothing", "/v2/models", "/v1/completions/x"):
        response = http.get(path)
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        client.completions.create(model="tiny", prompt="x", max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="`nope`"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("cannot write /tmp/x.safetensors: disk", "cannot write <path>: disk"),
        ("The model `/data/m` does not exist.", "The model `<path>` does not exist."),
        ("written to /a/b-c_1.safetensors (no space)", "written to <path> (no space)"),
        ("1/2 and/or http://host/path stay", "1/2 and/or http://host/path stay"),
        ("'/etc/passwd'", "'<path>'"),
    ],
)
def test_local_paths_are_hidden(message: str, told: str) -> None:
    assert hide_local_paths(message) == told


def test_a_folder_that_cannot_be_written_fails_the_request(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The reason reaches the client, as an answer or as an event; later requests succeed."""
    allow = {"allow_custom_save_path": True}
    with live_server(tiny_llama, tmp_path / "rows", connector=allow) as server:
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / "file").write_text("in the way")
        bad = OK | {
            "kv_transfer_params": {"hidden_states_path": str(tmp_path / "rows/file/x.safetensors")}
        }
        with server.client() as http:
            response = http.post(COMPLETIONS, json=bad)
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (500, "InternalServerError"), error
            assert "hidden states cannot be written to <path>" in error["message"]
            streamed = http.post(COMPLETIONS, json=bad | {"stream": True, "max_tokens": 3})
            assert "cannot be written" in streamed.text
            together = http.post(COMPLETIONS, json=OK | {"prompt": [[1, 2]] * 3})
            assert together.status_code == 200
            _check_a_dead_core(server, http)


def _check_a_dead_core(server: LiveServer, http: httpx.Client) -> None:
    """Everybody who waits is told at once, health is gone, nothing hangs."""
    answers: list[httpx.Response] = []
    waiting = OK | {"max_tokens": 400, "ignore_eos": True}

    def ask(stream: bool) -> None:
        with server.client() as client:
            answers.append(client.post(COMPLETIONS, json=waiting | {"stream": stream}))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while http.get("/load").json()["server_load"] < 2:
        pass
    os.kill(server.state.engine.core_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert len(answers) == 2
    for answer in answers:
        assert "the engine is gone" in answer.text
        assert answer.status_code in (200, 500)  # 200: a stream that had begun
    assert http.get("/health").status_code == 503
    refused = http.post(COMPLETIONS, json=OK)
    assert (refused.status_code, refused.json()["error"]["type"]) == (500, "InternalServerError")


def test_a_body_that_never_ends_leaves_nothing(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 1000\r\n\r\n{"prompt": [1, 2'
        )
    with server.client() as http:
        assert http.post(COMPLETIONS, json=OK).status_code == 200
        assert http.get("/load").json() == {"server_load": 0}


def test_a_refused_request_is_not_an_aborted_one(http: httpx.Client) -> None:
    """A rising number of aborted requests is the sign of clients that give up."""

    def num_aborted() -> list[str]:
        return [one for one in http.get("/metrics").text.splitlines() if '"abort"' in one]

    before = num_aborted()
    reply = http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
    assert reply.status_code == 400
    assert len(before) == 1
    assert num_aborted() == before
