"""/v1/embeddings, /pooling and /classify: values, forms of bodies, errors."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.engine.harness import engine, random_prompts
from tests.engine.test_heads import make_head, value_head
from tests.entrypoints.live_server import LiveServer, live_server
from vllm import LLM
from vllm.entrypoints.openai import pooling as endpoint
from vllm.entrypoints.openai.cli_args import ServerSettings

PROMPTS = [one["prompt_token_ids"] for one in random_prompts(61, [3, 50, 171], vocabulary=250)]
TEXTS = ["A text.", "é", "another text " * 9]
PATHS = ("/v1/embeddings", "/pooling", "/classify")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    make_head(folder, "qwen3", "sequence", id2label={0: "a", 1: "b", 2: "c"}, is_matryoshka=True)
    return folder


@pytest.fixture(scope="module")
def server(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("files")
    with live_server(classifier, folder, layers=None) as running:
        yield running


@pytest.fixture(scope="module")
def offline(classifier: Path) -> Iterator[LLM]:
    with engine(classifier) as llm:
        yield llm


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[str, str | None]:
    content = json.dumps(body)  # which escapes what has no place in UTF-8
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, 400), response.text
    return error["message"], error["param"]


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


def test_the_openai_client_gets_the_vectors_of_the_offline_engine(
    client: openai.OpenAI, offline: LLM
) -> None:
    """It asks for base64 and decodes it."""
    for inputs in (TEXTS, PROMPTS, TEXTS[0], PROMPTS[1]):
        wanted = [one.outputs.embedding for one in offline.embed(inputs)]
        tokens = sum(len(one.prompt_token_ids) for one in offline.embed(inputs))
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="tiny", input=inputs, **encoding)  # type: ignore[arg-type]
            made = [item.embedding for item in answer.data]
            if encoding.get("encoding_format") == "base64":
                made = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in made]  # type: ignore[arg-type]
            assert made == wanted
            assert [item.index for item in answer.data] == list(range(len(wanted)))
            assert (answer.object, answer.model) == ("list", "tiny")
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    short = client.embeddings.create(model="tiny", input=TEXTS, dimensions=16)
    expected = [one.outputs.embedding for one in offline.embed(TEXTS, dimensions=16)]
    assert [item.embedding for item in short.data] == expected
    with pytest.raises(openai.BadRequestError, match="dimensions=0: has to be from 1"):
        client.embeddings.create(model="tiny", input=TEXTS, dimensions=0)
    with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
        client.embeddings.create(model="x", input=TEXTS)


def test_the_form_of_the_answers(http: httpx.Client) -> None:
    usage = {
        "prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip
    for path, prefix, kind, keys in (
        ("/v1/embeddings", "embd-", "embedding", {"index", "object", "embedding"}),
        ("/pooling", "pool-", "pooling", {"index", "object", "data"}),
        ("/classify", "classify-", None, {"index", "label", "probs", "num_classes"}),
    ):
        answer = post(http, path, input="A text.")
        assert list(answer) == ["id", "object", "created", "model", "data", "usage"]
        assert answer["id"].startswith(prefix) and len(answer["id"]) == len(prefix) + 16
        assert (answer["object"], answer["usage"]) == ("list", usage)
        (item,) = answer["data"]
        assert set(item) == keys and item.get("object") == kind
        named = http.post(path, json={"input": "A"}, headers={"x-request-id": "mine"}).json()
        assert named["id"] == f"{prefix}mine"


def test_options(http: httpx.Client, offline: LLM) -> None:
    def offline_vectors(prompts: Any, *args: Any, **options: Any) -> list[list[float]]:
        return [one.outputs.embedding for one in offline.embed(prompts, *args, **options)]

    for pooling in ("last", "mean"):
        for normalize in (True, False):
            options = {"pooling": pooling, "normalize": normalize}
            made = vectors(post(http, "/v1/embeddings", input=PROMPTS, **options))
            assert made == offline_vectors(PROMPTS, pooling, normalize)
    cut = vectors(post(http, "/v1/embeddings", input=PROMPTS, truncate_prompt_tokens=5))
    assert cut == offline_vectors([ids[:5] for ids in PROMPTS])
    end = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
    made = vectors(post(http, "/v1/embeddings", input=PROMPTS, **end))
    assert made == offline_vectors([ids[-5:] for ids in PROMPTS])
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert vectors(post(http, "/v1/embeddings", messages=messages)) == offline_vectors(text)
    longer = post(http, "/v1/embeddings", messages=messages, add_generation_prompt=True)
    assert vectors(longer) == offline_vectors(f"{text}<|im_start|>assistant\n")
    salted = post(http, "/v1/embeddings", input=PROMPTS, cache_salt="a", add_special_tokens=False)
    assert vectors(salted) == offline_vectors(PROMPTS)
    warned = post(http, "/v1/embeddings", input="A", frobnicate=1)
    assert warned["warnings"] == ["the field 'frobnicate' is not known and has no effect"]
    of_chats = {"chat_template": "{{ messages }}", "chat_template_kwargs": {"a": 1}, "tools": []}
    (warning, other) = post(http, "/v1/embeddings", input="A", **of_chats)["warnings"]
    assert warning == "the field 'chat_template' has no effect: there are no messages"
    assert "'chat_template_kwargs'" in other
    variables = post(http, "/v1/embeddings", messages=messages, chat_template_kwargs={"a": 1})
    (warning,) = variables["warnings"]
    assert warning.startswith("the field 'chat_template_kwargs.a' has no effect: the chat template")


def test_classes(http: httpx.Client, offline: LLM) -> None:
    for options in ({}, {"use_activation": False}):
        answer = post(http, "/classify", input=TEXTS, **options)
        for item, output in zip(answer["data"], offline.classify(TEXTS, **options), strict=True):  # type: ignore[arg-type]
            assert item["probs"] == output.outputs.probs and item["num_classes"] == 3
            assert item["label"] == output.outputs.label and item["label"] in "abc"


def test_pooling(http: httpx.Client, offline: LLM) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("embed", {"pooling": "mean", "normalize": False}),
        ("classify", {"use_activation": False}),
        ("token_embed", {"dimensions": 8}),
        ("token_classify", {}),
    ]
    for task, options in cases:
        wanted = [one.outputs.data for one in offline.encode(TEXTS, task, **options)]
        answer = post(http, "/pooling", input=TEXTS, task=task, **options)
        assert [item["data"] for item in answer["data"]] == [one.tolist() for one in wanted]
        coded = post(http, "/pooling", input=TEXTS, task=task, encoding_format="base64", **options)
        for item, data in zip(coded["data"], wanted, strict=True):
            flat = np.frombuffer(base64.b64decode(item["data"]), "<f4").copy()
            assert torch.equal(torch.from_numpy(flat).view(data.shape), data)


def test_a_model_without_a_head(tmp_path: Path, tiny_llama: Path) -> None:
    value_head(tmp_path / "value", "llama")
    with live_server(tiny_llama, tmp_path, layers=None) as plain, plain.client() as http:
        message, _ = refusal(http, "/classify", input="A")
        assert "architectures=['LlamaForCausalLM']: the checkpoint has no v_head.summary" in message
        assert "not trained for shorter" in refusal(http, PATHS[0], input="A", dimensions=8)[0]
        assert vectors(post(http, "/v1/embeddings", input="A"))
    with engine(tmp_path / "value") as llm:
        wanted = [one.outputs.data.tolist() for one in llm.reward(PROMPTS)]
    with live_server(tmp_path / "value", tmp_path, layers=None) as value, value.client() as http:
        answer = post(http, "/pooling", input=PROMPTS, task="classify")
        assert [item["data"] for item in answer["data"]] == wanted


HOSTILE: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "input: a text or token ids are needed", "input"),
    ({"input": ""}, "input: a text or token ids are needed", "input"),
    ({"input": None}, "input: a text or token ids are needed", "input"),
    ({"input": []}, "the input is empty", None),
    ({"input": [[]]}, "input 0 of the list is empty", None),
    ({"input": ["a", ""]}, "input 1 of the list is empty", None),
    ({"input": [[5], []]}, "input 1 of the list is empty", None),
    ({"input": 5}, "body.input: Input should be a string", "body.input"),
    ({"input": {"a": 1}}, "body.input: Input should be a string", "body.input"),
    ({"input": [5, "a"]}, "body.input.1: ", "body.input.1"),
    ({"input": [5, -1]}, "body.input.1: ", "body.input.1"),
    ({"input": [[5], [1.5]]}, "body.input.1.0: ", "body.input.1.0"),
    ({"input": [True]}, "body.input.0: ", "body.input.0"),
    ({"input": [[5], [999]]}, "prompt 1: Token id 999 is out of vocabulary", None),
    ({"input": [5] * 513}, "prompt 0: This model's maximum context length is 512 tokens", None),
    ({"input": "x" * 600}, "prompt 0: This model's maximum context length is 512 tokens", None),
    ({"input": "x" * 10**6}, "prompt 0: This model's maximum context length is 512 tokens", None),
    ({"input": "A", "messages": [{"role": "user", "content": "B"}]}, "with messages", "input"),
    ({"messages": []}, "messages", None),
    ({"messages": [{"role": "user", "content": "A"}], "chat_template": "x"}, "template", None),
    ({"input": "A", "cache_salt": "\ud800"}, "body", "body"),
    ({"input": "A", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0", None),
    ({"input": "A", "truncate_prompt_tokens": 600}, "truncate_prompt_tokens=600", None),
    ({"input": "A", "truncate_prompt_tokens": -2}, "truncate", "body.truncate_prompt_tokens"),
    ({"input": "A", "truncation_side": "top"}, "truncation_side", "body.truncation_side"),
]
OF_VECTORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"encoding_format": "bytes"}, "'float' or 'base64'", "body.encoding_format"),
    ({"pooling": "cls"}, "'last' or 'mean'", "body.pooling"),
    ({"normalize": "perhaps"}, "body.normalize", "body.normalize"),
    ({"dimensions": 73}, "dimensions=73: has to be from 1 to 72", "dimensions"),
    ({"dimensions": 2**62}, "has to be from 1 to 72", "dimensions"),
    ({"dimensions": 1.5}, "body.dimensions", "body.dimensions"),
]


@pytest.mark.parametrize("path", PATHS)
def test_bad_bodies_are_named_and_others_unaffected(
    path: str, server: LiveServer, http: httpx.Client
) -> None:
    def embed() -> Any:
        with server.client() as other:
            return post(other, "/v1/embeddings", input=PROMPTS)["data"]

    expected, done, found = embed(), threading.Event(), list[Any]()

    def repeat() -> None:
        while not done.is_set():
            found.append(embed())

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        cases = list(HOSTILE)
        if path != "/classify":
            cases += [({"input": "A", **more}, *rest) for more, *rest in OF_VECTORS]  # type: ignore[misc]
        for body, part, param in cases:
            message, named = refusal(http, path, **body)
            assert part in message and named == param, (body, message, named)
    finally:
        done.set()
        thread.join()
    assert found and all(one == expected for one in found)


def test_tasks_and_their_options(http: httpx.Client) -> None:
    message, param = refusal(http, "/pooling", input="A", task="score")
    assert param == "body.task" and "'token_classify'" in message
    for task, options in (
        ("classify", {"pooling": "last"}),
        ("token_classify", {"dimensions": 4}),
        ("token_embed", {"pooling": "mean"}),
        ("embed", {"use_activation": True}),
    ):
        message, _ = refusal(http, "/pooling", input="A", task=task, **options)
        assert f"pooling_task='{task}'" in message


def test_a_reply_that_would_be_too_large(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_VALUES", 72 * 4)
    assert len(post(http, "/v1/embeddings", input=["a"] * 4)["data"]) == 4
    message, param = refusal(http, "/v1/embeddings", input=["a"] * 50)
    assert "more than 288 numbers; send fewer inputs" in message and param == "input"
    message, _ = refusal(http, "/pooling", input=["1", "12345"], task="token_embed")
    assert message == "prompt 1: the prompt has 5 tokens; this call takes 4"
    message, _ = refusal(http, "/pooling", input=["123", "123"], task="token_embed")
    assert "more than 288 numbers" in message
    assert len(post(http, "/v1/embeddings", input=["a"] * 4)["data"]) == 4


def test_many_inputs_at_once(http: httpx.Client, offline: LLM) -> None:
    """More than the engine takes at a time; they come back in their order."""
    inputs = [[index % 250, index // 250 + 1] for index in range(700)]
    made = vectors(post(http, "/v1/embeddings", input=inputs))
    assert made == [one.outputs.embedding for one in offline.embed(inputs)]


def test_limits_of_generation_requests_hold(classifier: Path, tmp_path: Path) -> None:
    """Keys, number and time; a client that leaves aborts its request."""
    settings = ServerSettings(api_key=["k"], request_timeout=0.2)
    running = live_server(classifier, tmp_path, layers=None, settings=settings)
    with running as server, server.client() as http:
        assert http.post("/v1/embeddings", json={"input": "A"}).status_code == 401
        http.headers["authorization"] = "Bearer k"
        many = {"input": [[5, 6, 7] * 150 + [index % 250] for index in range(2000)]}
        response = http.post("/v1/embeddings", json=many)
        assert response.status_code == 504, response.text
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json=many, timeout=0.05)
        for _ in range(200):
            if http.get("/load").json()["server_load"] == 0:
                break
        assert vectors(post(http, "/v1/embeddings", input="A"))
