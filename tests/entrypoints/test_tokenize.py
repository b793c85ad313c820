"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.live_server import LiveServer
from tests.transformers_utils.test_answer_masks import RawBytes


def tokenize(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_texts(http: httpx.Client) -> None:
    answer = tokenize(http, prompt="abc é", return_token_strs=True, model="tiny")
    assert answer["count"] == len(answer["tokens"]) == 6
    assert answer["tokens"][:4] == [64, 65, 66, 220]
    assert answer["token_strs"][:4] == ["a", "b", "c", "Ġ"]
    assert answer["max_model_len"] == 512
    assert tokenize(http, prompt="") == {
        "count": 0, "max_model_len": 512, "tokens": [], "token_strs": None,
    }  # fmt: skip
    assert tokenize(http, prompt="x" * 2000)["count"] == 2000


def test_words_may_be_bytes(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = RawBytes([b"a", b"\xc3", b"\xa9"])
    monkeypatch.setattr(server.state.engine, "get_tokenizer", lambda: tokenizer)
    answer = tokenize(http, prompt="aé", return_token_strs=True)
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]


def test_conversations(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with_prompt = tokenize(http, messages=messages)["tokens"]
    without = tokenize(http, messages=messages, add_generation_prompt=False)["tokens"]
    assert with_prompt[: len(without)] == without and len(with_prompt) > len(without)
    both = http.post("/tokenize", json={"messages": messages, "prompt": "a"})
    assert both.status_code == 400
    assert both.json()["error"]["message"] == "prompt: cannot be combined with messages"


def test_token_ids(http: httpx.Client) -> None:
    def text(tokens: list[int]) -> str:
        response = http.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 200, response.text
        return str(response.json()["prompt"])

    ids = tokenize(http, prompt="Grüße <|im_end|>!")["tokens"]
    assert text(ids) == "Grüße <|im_end|>!"
    assert text([64, 306, 10**6, 2**31, 10**25, 65]) == "ab"
    assert text([]) == ""
