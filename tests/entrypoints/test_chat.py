"""/v1/chat/completions: fields, values, tools."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

from tests.engine.harness import greedy
from tests.entrypoints.live_server import LiveServer
from vllm import LLM
from vllm.entrypoints.openai.tool_parsers import HermesToolParser, ToolParser

GREEDY = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_every_field_is_there(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=2)
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint"),
        *("usage", "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params"),
        *("ec_transfer_params", "metrics"),
    ]
    choice = answer["choices"][0]
    assert set(choice) == {
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"),
        *("routed_experts", "kv_transfer_params"),
    }
    assert set(choice["message"]) == {
        *("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"),
    }
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] is None and choice["token_ids"] is None


def test_values_are_those_of_the_offline_engine(http: httpx.Client, reference: LLM) -> None:
    params = greedy(6, logprobs=2)
    wanted = reference.chat(MESSAGES, params, use_tqdm=False)[0]
    answer = chat(
        http, max_tokens=6, return_token_ids=True, logprobs=True, top_logprobs=2, **GREEDY
    )
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == wanted.prompt_token_ids
    assert choice["message"]["content"] == wanted.outputs[0].text
    assert choice["token_ids"] == list(wanted.outputs[0].token_ids)
    assert answer["prompt_text"] == wanted.prompt
    content = choice["logprobs"]["content"]
    rows, ids = wanted.outputs[0].logprobs, wanted.outputs[0].token_ids
    for item, row, token in zip(content, rows, ids, strict=True):
        assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
        assert item["logprob"] == pytest.approx(row[token].logprob, abs=1e-6)
        text = bytes(item["bytes"]).decode(errors="replace")
        assert text == item["token"] == row[token].decoded_token
        best = sorted((entry.logprob for entry in row.values()), reverse=True)[:2]
        assert [top["logprob"] for top in item["top_logprobs"]] == pytest.approx(best, abs=1e-6)


def test_bytes_are_those_of_parts_of_characters(http: httpx.Client) -> None:
    """Tokens of this vocabulary are bytes, so that most of the tokens have no text of their own."""
    ids = [127, 102]
    options = {"allowed_token_ids": ids, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    answer = chat(http, logprobs=True, top_logprobs=2, return_token_ids=True, **options)
    choice = answer["choices"][0]
    assert set(choice["token_ids"]) == set(ids)
    for token, item in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert item["bytes"] == list("é".encode()[ids.index(token) :][:1])
        assert item["token"] == "\ufffd"
    content = b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"])
    assert content.decode(errors="replace") == choice["message"]["content"]
    assert "é" in choice["message"]["content"]


def test_the_whole_vocabulary(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.state.engine.input_processor, "_max_logprobs", -1)
    answer = chat(http, max_tokens=1, logprobs=True, top_logprobs=-1, **GREEDY)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    values = [top["logprob"] for top in token["top_logprobs"]]
    assert len(values) == server.state.vocab_size
    assert values == sorted(values, reverse=True)
    assert sum(map(math.exp, values)) == pytest.approx(1.0)


def test_the_answer_may_fill_the_context(http: httpx.Client) -> None:
    answer = chat(http, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert (
        chat(http, max_tokens=9, max_completion_tokens=2, ignore_eos=True)["usage"][
            "completion_tokens"
        ]
        == 2
    )


def test_no_content_is_an_empty_text_whatever_the_role(http: httpx.Client) -> None:
    for role in ("system", "user", "assistant", "tool"):
        found = []
        for content in ({"content": None}, {"content": ""}, {}):
            body = {"messages": [*MESSAGES, {"role": role, **content}]}
            response = http.post("/tokenize", json=body)
            assert response.status_code == 200, response.text
            found.append(response.json()["tokens"])
        assert found[0] == found[1] == found[2], role


def test_every_field_of_a_message_reaches_the_template(server: Any, http: httpx.Client) -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ x }}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant", "content": None, "reasoning_content": "r", "thinking": "t",
            "tool_calls": [{"id": "1", "type": "function",
                            "function": {"name": "f", "arguments": '{"k": [1, null]}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    server.state.chat_template = template
    try:
        body = {"messages": messages, "chat_template_kwargs": {"x": "extra"}}
        ids = http.post("/tokenize", json=body).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    finally:
        server.state.chat_template = None
    assert text.endswith("nullextra")
    decoder, seen = json.JSONDecoder(), []
    while text.startswith("{"):
        message, end = decoder.raw_decode(text)
        seen.append(message)
        text = text[end:]
    assert seen[0]["content"] == "a\nb"
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"k": [1, None]}
    assert (seen[1]["reasoning_content"], seen[1]["thinking"]) == ("r", "t")
    assert seen[2] == {"role": "tool", "tool_call_id": "1", "content": "done"}


def test_documents_and_effort_reach_the_template(server: Any, http: httpx.Client) -> None:
    """They are fields of vLLM's and OpenAI's requests, and variables of templates."""
    fields = {"documents": [{"title": "t"}], "reasoning_effort": "low"}
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    server.state.chat_template = "{{ documents | tojson }}{{ reasoning_effort }}" + said
    try:
        found = [
            http.post("/tokenize", json={"messages": MESSAGES} | body).json()["tokens"]
            for body in (fields, {"chat_template_kwargs": fields}, {})
        ]
        assert found[0] == found[1]
        assert found[0][:2] != found[2][:2]
        twice = fields | {"chat_template_kwargs": {"reasoning_effort": "high"}}
        answer = http.post("/tokenize", json={"messages": MESSAGES} | twice)
        text = http.post("/detokenize", json={"tokens": found[0]}).json()["prompt"]
    finally:
        server.state.chat_template = None
    assert text == '[{"title": "t"}]lowshello'
    assert answer.status_code == 400
    assert "reasoning_effort is also in" in answer.json()["error"]["message"]


def test_the_openai_client(client: openai.OpenAI, reference: LLM) -> None:
    wanted = reference.chat(MESSAGES, greedy(5), use_tqdm=False)[0].outputs[0]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=5, temperature=0,  # type: ignore[arg-type]
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None and answer.usage.completion_tokens == 5


CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "n": [1]}}\n</tool_call>'
ANSWERS = [
    ("just text", "just text", []),
    (CALL, None, [("f", {"city": "Köln", "n": [1]})]),
    (f"Let me see. {CALL}\n{CALL}", "Let me see.", [("f", {"city": "Köln", "n": [1]})] * 2),
    ("a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b", []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (CALL.removesuffix("</tool_call>"), None, [("f", {"city": "Köln", "n": [1]})]),
    ("1 <tool 2 <tool_", "1 <tool 2 <tool_", []),
    ('<tool_call>{"name": "g"}</tool_call>', None, [("g", {})]),
    ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', None, [("g", {})]),
    ('<tool_call>{"name": "g", "parameters": {"a": 1}}</tool_call>', None, [("g", {"a": 1})]),
    (
        '<tool_call>{"name": "g", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "g", "args": {"a": 1}}</tool_call>',
        [],
    ),
    (
        'a<tool_call>{"name": "g", "arguments": {"a": "</tool_call>"}}</tool_call>b',
        "ab",
        [("g", {"a": "</tool_call>"})],
    ),
    (
        f'<tool_call>{{"name": "g", "arguments": {{"a": {"[" * 99999}</tool_call>{CALL}',
        f'<tool_call>{{"name": "g", "arguments": {{"a": {"[" * 99999}</tool_call>',
        [("f", {"city": "Köln", "n": [1]})],
    ),
    (
        'a<tool_call>{"arguments": {"a": "</tool_call>\\""}, "name": "g"}</tool_call>b',
        "ab",
        [("g", {"a": '</tool_call>"'})],
    ),
    (
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": \\"</tool_call>\\"}"}</tool_call>' + CALL,
        None,
        [("g", {"a": "</tool_call>"}), ("f", {"city": "Köln", "n": [1]})],
    ),
    (  # a quote that is not closed does not hide the end
        f'<tool_call>{{"name: "g", "parameters": {{}}}}</tool_call>{CALL}',
        '<tool_call>{"name: "g", "parameters": {}}</tool_call>',
        [("f", {"city": "Köln", "n": [1]})],
    ),
    (
        '<tool_call>{"name": "g", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "g", "arguments": "no JSON"}</tool_call>',
        [],
    ),
    (  # the closing tag is missing
        f'<tool_call>{{"name": "g", "arguments": {{"a": "<tool_call>"}}}}\n{CALL}',
        None,
        [("g", {"a": "<tool_call>"}), ("f", {"city": "Köln", "n": [1]})],
    ),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS)
def test_hermes_tool_calls(text: str, content: str | None, calls: list[Any]) -> None:
    found = HermesToolParser.parse(text)
    assert found.content == content
    got = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    assert got == calls
    assert len({call.id for call in found.tool_calls}) == len(calls)
    for size in (1, 3, 7, 100) if len(text) < 1000 else ():
        parser: ToolParser = HermesToolParser()
        pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
        news = [parser.push(piece, piece_end) for piece, piece_end in _with_last(pieces)]
        streamed = join_calls([c.model_dump() for new in news for c in new.tool_calls])
        assert [(name, json.loads(arguments)) for name, arguments in streamed] == calls
        assert "".join(new.content for new in news).strip() == (content or "")


def join_calls(deltas: list[Any]) -> list[tuple[str, str]]:
    """(name, arguments) of streamed tool calls: the first piece of each names it."""
    found: dict[int, list[str]] = {}
    for delta in deltas:
        function = delta["function"]
        if "id" in delta:
            assert delta["index"] == len(found) and delta["type"] == "function"
            found[delta["index"]] = [function["name"]]
        found[delta["index"]].append(function["arguments"])
    return [(pieces[0], "".join(pieces[1:])) for pieces in found.values()]


STREAMED = [
    (CALL, '{"city": "Köln", "n": [1]}'),
    ('<tool_call>{"name": "f", "arguments": {"a": "}{\\""}} </tool_call>', '{"a": "}{\\""}'),
    ('<tool_call>{"name":"f","arguments":{"a": {"b": []}}}', '{"a": {"b": []}}'),
    ('<tool_call>{"name": "f", "arguments": {"cut": [1', '{"cut": [1'),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "{}"),
]


@pytest.mark.parametrize(("text", "arguments"), STREAMED)
def test_arguments_are_sent_as_they_come(text: str, arguments: str) -> None:
    """After each character, all of the arguments that is there has been sent."""
    parser = HermesToolParser()
    deltas: list[Any] = []
    start = text.index(arguments[:5] if len(arguments) > 5 else arguments)
    for end, character in enumerate(text, 1):
        new = parser.push(character, is_last=end == len(text))
        assert new.content == ""
        deltas += [call.model_dump() for call in new.tool_calls]
        sent = "".join(sent for _, sent in join_calls(deltas))
        assert sent == arguments[: max(0, end - start)], text[:end]
    assert [name for name, _ in join_calls(deltas)] == ["f"]
    assert parser.num_calls == 1


def _with_last(pieces: list[str]) -> list[tuple[str, bool]]:
    return [(piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]


def test_numbers_are_as_they_were_written() -> None:
    for number in ("1.0e400", "1e2", "123456789012345678901234567890", "0.10"):
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
        (call,) = HermesToolParser.parse(text).tool_calls
        assert call.function.arguments == f'{{"a": {number}}}'


def test_line_breaks_in_arguments_are_escaped() -> None:
    """Models write code into strings as it is; streams and whole answers have the same call."""
    arguments = '{"code": "a\n\tb \\"\\\\", "x":\n"\r"}'
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}</tool_call>'
    expected = {"code": 'a\n\tb "\\', "x": "\r"}
    (call,) = HermesToolParser.parse(text).tool_calls
    assert json.loads(call.function.arguments) == expected
    for size in range(1, 9):
        parser = HermesToolParser()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        news = [parser.push(piece, piece_end) for piece, piece_end in _with_last(pieces)]
        calls = join_calls([c.model_dump() for new in news for c in new.tool_calls])
        assert [json.loads(arguments) for _, arguments in calls] == [expected]
