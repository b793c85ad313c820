"""Fields that the server does not know: told in the reply, or refused; and files on request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.live_server import live_server
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.errors import MAX_MESSAGE_LENGTH, MAX_PARAM_LENGTH

OK: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}
GREEDY = OK | {"temperature": 0}
UNKNOWN = {"frobnicate": 1, "user": None, "kv_transfer_params": {"layers": [1]}}
WARNINGS = [
    "the field 'frobnicate' is not known and has no effect",
    "the field 'kv_transfer_params.layers' is not known and has no effect",
]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_reply_tells(http: httpx.Client) -> None:
    assert "warnings" not in http.post("/v1/completions", json=OK).json()
    assert http.post("/v1/completions", json=OK | UNKNOWN).json()["warnings"] == WARNINGS
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **UNKNOWN}
    assert http.post("/v1/chat/completions", json=chat).json()["warnings"] == WARNINGS
    stream = {"stream": True, "stream_options": {"include_usage": True, "bar": 1, "baz": None}}
    first, *rest = events(http.post("/v1/chat/completions", json={**chat, **stream}))
    nested = "the field 'stream_options.bar' is not known and has no effect"
    assert sorted(first["warnings"]) == sorted([*WARNINGS, nested])
    assert rest
    assert all("warnings" not in event for event in rest)


UNREAD = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 2,
    "chat_template_kwargs": {"enable_thinking": False},
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}


def test_the_reply_tells_what_the_template_does_not_read(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=UNREAD | TOOLS).json()
    ending = "has no effect: the chat template does not read it"
    names = ("tools", "chat_template_kwargs.enable_thinking")
    assert answer["warnings"] == [f"the field {name!r} {ending}" for name in names]
    none = {"chat_template_kwargs": {}, "tools": [], "documents": []}
    assert "warnings" not in http.post("/v1/chat/completions", json=UNREAD | none).json()


LABELS = {
    "user": "u1", "safety_identifier": "u1", "prompt_cache_key": "k", "metadata": {"a": "b"},
    "store": False, "service_tier": "auto",
}  # fmt: skip


def test_fields_that_change_no_answer(http: httpx.Client) -> None:
    """Clients of OpenAI's API send them, or zeros where they ask for nothing."""
    assert "warnings" not in http.post("/v1/completions", json=OK | LABELS).json()
    none = {"chat_template_kwargs": None, "logprobs": False, "top_logprobs": 0}
    answer = http.post("/v1/chat/completions", json=UNREAD | LABELS | none).json()
    assert "warnings" not in answer
    assert answer["choices"][0]["logprobs"] is None


def test_a_connector_is_not_handed_megabytes(http: httpx.Client) -> None:
    """The engine copies them for each choice: with 1.2 million keys others waited for 10 s."""
    for count, status in ((200_000, 200), (300_000, 400)):
        given = {"frobnicate": [0] * count}
        body = {"prompt": [5, 6], "max_tokens": 1, "kv_transfer_params": given}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == status
    assert "at most 262,144 are handed to a connector" in answer.json()["error"]["message"]


def test_strict_requests(tiny_llama: Path, tmp_path: Path) -> None:
    settings = ServerSettings(strict_requests=True)
    option = {"extract_only_when_asked": True}
    with (
        live_server(tiny_llama, tmp_path, settings=settings, connector=option) as server,
        server.client() as client,
    ):
        for more in (
            {"frobnicate": 1},
            {"kv_transfer_params": {"layers": [1]}},
            {"kv_transfer_params": {"hidden_states_path": str(tmp_path / "mine.safetensors")}},
            {"stream": True, "stream_options": {"bar": 1}},
            {"vllm_xargs": {"bar": 1}},
        ):
            answer = client.post("/v1/completions", json=OK | more)
            assert answer.status_code == 400
            assert "not known; leave it out" in answer.json()["error"]["message"]
        answer = client.post("/v1/chat/completions", json=UNREAD)
        assert answer.status_code == 400
        assert "enable_thinking: the chat template does not" in answer.json()["error"]["message"]
        for path, body in (("", {"frobnicate": 1}), ("?frobnicate=1", None)):
            answer = client.post(f"/reset_prefix_cache{path}", json=body)
            assert answer.status_code == 400
            assert "body.frobnicate: not known" in answer.json()["error"]["message"]
        assert client.post("/reset_prefix_cache", json={}).status_code == 200
        # The same server writes files only for requests that ask for them.
        plain = client.post("/v1/completions", json=OK | LABELS | {"n": 2})
        assert plain.json()["kv_transfer_params"] is None
        assert list(tmp_path.iterdir()) == []
        asked = client.post("/v1/completions", json=GREEDY | {"kv_transfer_params": {}}).json()
        path = Path(asked["kv_transfer_params"]["hidden_states_path"])
        assert path.parent == tmp_path
        assert path.stat().st_size > 3 * 3 * 72 * 4
        assert asked["choices"][0]["text"] == http_text(client)


def http_text(client: httpx.Client) -> str:
    text: str = client.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["x" * 100_000]},
        {"response_format": {"type": "x" * 100_000}},
        {"logit_bias": {"x" * 100_000: 1}},
        {"model": "x" * 100_000},
        {"kv_transfer_params": {"hidden_states_path": ["x" * 100_000]}},
        {"hidden_states": {"x" * 100_000: 1}},
        {"steering": {"x" * 100_000: 1}},
        {"vllm_xargs": {"hidden_states": {"x" * 100_000: 1}}},
    ],
)
def test_errors_do_not_repeat_long_values(http: httpx.Client, more: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json=OK | more)
    assert answer.status_code != 200 or len(answer.content) < 10_000
    if answer.status_code != 200:
        assert len(answer.content) < MAX_MESSAGE_LENGTH + MAX_PARAM_LENGTH + 200
        assert answer.status_code in (400, 404)


def test_no_folder_for_temporary_files(tiny_llama: Path) -> None:
    code = (
        "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
        "from vllm.entrypoints.cli.main import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(tiny_llama)], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm serve: error: no folder for temporary files can be written")
    assert "set TMPDIR" in line
