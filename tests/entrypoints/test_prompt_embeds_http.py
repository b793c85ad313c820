"""``prompt_embeds`` of /v1/completions: values, and what is not unpacked."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import live_server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 7, "return_token_ids": True}


@pytest.fixture(scope="module")
def embedding(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("rows")
    with (
        live_server(tiny_llama, folder, enable_prompt_embeds=True) as server,
        server.client() as client,
    ):
        yield client


def encoded(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def refused(client: httpx.Client, **body: Any) -> str:
    response = client.post("/v1/completions", json={**GREEDY, **body})
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_embeddings_of_ids_give_their_tokens(embedding: httpx.Client, tiny_llama: Path) -> None:
    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    ids = [prompt["prompt_token_ids"] for prompt in random_prompts(1, [9, 40])]
    by_ids = embedding.post("/v1/completions", json={"prompt": ids, **GREEDY}).json()
    given = [encoded(table[torch.tensor(one)]) for one in ids]
    by_embeds = embedding.post("/v1/completions", json={"prompt_embeds": given, **GREEDY}).json()
    for one, other in zip(by_ids["choices"], by_embeds["choices"], strict=True):
        assert one["token_ids"] == other["token_ids"]
        path, other_path = (
            choice["kv_transfer_params"]["hidden_states_path"] for choice in (one, other)
        )
        rows, others = load_file(path), load_file(other_path)
        assert torch.equal(rows["hidden_states"], others["hidden_states"])
        assert set(others["token_ids"].tolist()) == {-1}
    assert by_embeds["usage"] == by_ids["usage"]
    one = embedding.post("/v1/completions", json={"prompt_embeds": given[0], **GREEDY}).json()
    assert one["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by the server",))


def test_what_is_no_tensor_is_refused(
    embedding: httpx.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    good = torch.ones(3, 72)
    assert "not base64" in refused(embedding, prompt_embeds="%%%")
    assert "not a tensor saved by torch.save" in refused(embedding, prompt_embeds="aGVsbG8=")
    assert "not a tensor saved by torch.save" in refused(embedding, prompt_embeds=encoded(_Evil()))
    assert "run by the server" not in capfd.readouterr().out
    assert "holds a list" in refused(embedding, prompt_embeds=encoded([good]))
    assert "[tokens, 72]" in refused(embedding, prompt_embeds=encoded(good[:, :70]))
    assert "not finite" in refused(embedding, prompt_embeds=encoded(good / 0))
    assert "513" in refused(embedding, prompt_embeds=encoded(torch.ones(1, 72).expand(513, 72)))
    assert "of 0 tokens" in refused(embedding, prompt_embeds=encoded(good[:0]))
    assert "the list is empty" in refused(embedding, prompt_embeds=[])
    both = refused(embedding, prompt_embeds=encoded(good), prompt="text")
    assert "cannot be combined with prompt" in both
    assert "cannot be combined" in refused(embedding, prompt_embeds=encoded(good), echo=True)
    logprobs = refused(embedding, prompt_embeds=encoded(good), prompt_logprobs=1)
    assert "prompt_logprobs=1 with prompt_embeds" in logprobs


def test_an_archive_that_grows_is_not_unpacked(embedding: httpx.Client) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    bomb = base64.b64encode(buffer.getvalue()).decode()
    assert len(bomb) < 200_000
    assert "unpacks to 67108864 bytes" in refused(embedding, prompt_embeds=bomb)


def test_it_is_off_by_default(http: httpx.Client) -> None:
    message = refused(http, prompt_embeds=encoded(torch.ones(3, 72)))
    assert "started without --enable-prompt-embeds" in message
