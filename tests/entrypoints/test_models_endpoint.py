"""/v1/models and the state of the server."""

from __future__ import annotations

import httpx
import openai

from tests.entrypoints.live_server import LiveServer
from vllm.version import PRODUCT, __version__


def test_models(http: httpx.Client, server: LiveServer, tiny_llama: object) -> None:
    response = http.get("/v1/models", headers={"authorization": "Bearer EMPTY"})
    listed = response.json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "also-tiny"]
    card = listed["data"][0]
    assert set(card) == {
        *("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"),
    }
    assert (card["object"], card["owned_by"], card["parent"]) == ("model", "vllm", None)
    assert (card["root"], card["max_model_len"]) == (str(tiny_llama), 512)
    assert http.get("/v1/models/also-tiny").json() == listed["data"][1]


def test_a_model_that_is_not_served(http: httpx.Client, client: openai.OpenAI) -> None:
    response = http.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The model `org/other` does not exist."
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]


def test_state_of_the_server(http: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        response = http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    version = http.get("/version").json()
    assert version.pop("commit")
    own = __version__.partition("+hse.")[2]
    assert version == {"version": __version__, "product": PRODUCT, "engine": own}
    assert http.get("/load").json() == {"server_load": 0}


def test_the_documentation_says_what_requests_hold(http: httpx.Client) -> None:
    assert "text/html" in http.get("/docs").headers["content-type"]
    schema = http.get("/openapi.json").json()
    schemas = schema["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    for path in ("/v1/completions", "/v1/chat/completions/render", "/tokenize", "/detokenize"):
        post = schema["paths"][path]["post"]
        name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert name.rsplit("/")[-1] in schemas
    missing = [ref for ref in _references(schema) if ref.rsplit("/")[-1] not in schemas]
    assert not missing


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [ref for value in node.values() for ref in _references(value)]
    return [ref for value in node for ref in _references(value)] if isinstance(node, list) else []
