"""Requests that nobody sends by mistake: schemathesis, paths in every text, a body of 100 MB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.entrypoints.serve_process import ServeProcess, serve

SECONDS = 20.0
"""Any single answer has to come sooner."""
HELLO = [{"role": "user", "content": "hello"}]
HEALTH = list(HealthCheck)
ENOUGH = {"max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], **ENOUGH},
    "/v1/chat/completions": {"messages": HELLO, **ENOUGH},
    "/v1/completions/render": {"prompt": [5, 6], **ENOUGH},
    "/v1/chat/completions/render": {"messages": HELLO, **ENOUGH},
    "/v1/embeddings": {"input": [5, 6]},
    "/pooling": {"input": [5, 6]},
    "/classify": {"input": [5, 6]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
TRAVERSALS = ("../../../../etc/passwd", "x/../../escaped", "/abs/escaped", "..\\escaped", "a\x00b")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer") / "inner" / "storage"


@pytest.fixture(scope="module")
def server(tiny_llama: Path, storage: Path) -> Iterator[ServeProcess]:
    """Short contexts: what is asked for in odd ways is not to take long."""
    flags = ["--max-model-len", "32", "--enable-hidden-states-download"]
    with serve(tiny_llama, storage, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_the_description_allows_and_what_it_does_not(
    server: ServeProcess, mode: GenerationMode
) -> None:
    """No answer is a 5xx or takes long."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {*BODIES, "/v1/hidden_states/{file_id}"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # any text is a path

        @settings(max_examples=15, deadline=None, database=None, suppress_health_check=HEALTH)
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("n"), int):
                case.body["n"] = min(case.body["n"], 2)  # or it would rightly take long
            response = case.call(timeout=SECONDS)
            case.validate_response(response, checks=[not_a_server_error])

        check()


def texts_of(schema: Any, document: dict[str, Any]) -> bool:
    """Return whether a field may be a text."""
    if "$ref" in schema:
        return texts_of(document["components"]["schemas"][schema["$ref"].split("/")[-1]], document)
    forms = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return schema.get("type") == "string" or any(texts_of(form, document) for form in forms)


def test_paths_in_every_text(http: httpx.Client, storage: Path) -> None:
    document = http.get("/openapi.json").json()
    num_fields = 0
    for path, body in BODIES.items():
        request = document["paths"][path]["post"]["requestBody"]
        name = request["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            if not texts_of(schema, document):
                continue
            num_fields += 1
            for text in TRAVERSALS:
                check_answer(http.post(path, json=body | {field: text}), storage)
    assert num_fields > 20
    nested: list[dict[str, Any]] = [
        {"kv_transfer_params": {"hidden_states_path": "TEXT", "TEXT": "TEXT"}},
        {"messages": [{"role": "TEXT", "content": "TEXT", "name": "TEXT", "tool_call_id": "TEXT"}]},
        {"stop": ["TEXT"], "bad_words": ["TEXT"], "chat_template_kwargs": {"x": "TEXT"}},
        {"response_format": {"type": "TEXT"}, "logit_bias": {"TEXT": 1.0}},
    ]
    for text in TRAVERSALS:
        for path, body in BODIES.items():
            for more in nested:
                filled = json.loads(json.dumps(more).replace("TEXT", json.dumps(text)[1:-1]))
                check_answer(http.post(path, json=body | filled), storage)
            if text.isprintable():
                header = {"x-request-id": text}
                check_answer(http.post(path, json=body, headers=header), storage)
        for path in ("/v1/models/", "/v1/hidden_states/"):
            assert http.get(path + text.replace("\0", "%00")).status_code == 404
    made = {path.name for path in storage.parent.parent.rglob("*")} - {"inner", "storage"}
    assert all(".safetensors" in name for name in made)
    assert not Path("/abs").exists()


def check_answer(answer: httpx.Response, storage: Path) -> None:
    """It is right, or an error in the one form; every file is in the folder itself."""
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == answer.status_code
    assert [path.name for path in storage.parent.parent.iterdir()] == ["inner"]
    assert [path.name for path in storage.parent.iterdir()] == ["storage"]
    assert not any(path.is_dir() for path in storage.iterdir())


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_100_mb(http: httpx.Client, path: str) -> None:
    """Announced or in chunks, of the right type or not, it is refused in the one form."""
    content = b" " * (100 << 20)
    parts = (content[: 1 << 20] for _ in range(100))
    for sent in (content, parts):
        answer = http.post(path, content=sent, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "RequestTooLargeError"
