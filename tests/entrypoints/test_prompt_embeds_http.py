"""``prompt_embeds`` of /v1/completions: values, and what is not unpacked."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import live_server
from vllm.inputs.prompt_embeds import read_embeds
from vllm.utils.torch_archive import read_saved

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


def archive(content: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in content.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def contents(value: Any) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_archive_that_grows_is_not_unpacked(embedding: httpx.Client) -> None:
    bomb = in_base64(archive({"data.pkl": b"\0" * (64 << 20)}, zipfile.ZIP_DEFLATED))
    assert len(bomb) < 200_000
    assert "the archive is compressed" in refused(embedding, prompt_embeds=bomb)


def test_entries_that_share_their_bytes(embedding: httpx.Client) -> None:
    """A directory that names one range of bytes many times claims more than the archive has."""
    buffer = io.BytesIO(archive({"data.pkl": b"\0" * 50_000}))
    with zipfile.ZipFile(buffer, "a") as file:
        file.filelist += file.filelist * 200
        file._didModify = True  # type: ignore[attr-defined]
    assert "claims to hold 10050000" in refused(
        embedding, prompt_embeds=in_base64(buffer.getvalue())
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(1, 72).expand(500, 72), r"\(500, 72\) was saved with 72 values"),
        (torch.ones(3, 72).to_sparse(), "_rebuild_sparse_tensor is not part"),
        (torch.ones(3, 72).to_sparse_csr(), "is not part of a dense tensor"),
        (torch.quantize_per_tensor(torch.ones(3, 72), 0.1, 0, torch.qint8), "is not part"),
        (torch.ones(3, 72, dtype=torch.complex64), "torch.ComplexFloatStorage is not part"),
        (torch.ones(3, 72, dtype=torch.float64), "torch.DoubleStorage is not part"),
        (torch.ones(3, 72, device="meta"), "is not part"),
        (torch.nested.nested_tensor([torch.ones(3, 72)]), "is not part"),
        ({"a": torch.ones(3, 72)}, "holds a dict"),
        (torch.ones(3, 72).tolist(), "holds a list"),
        (np.ones((3, 72)), "is not part"),
    ],
)
def test_only_dense_tensors_are_read(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_embeds(encoded(value))


def test_a_tensor_never_has_more_than_its_archive() -> None:
    content = contents(torch.ones(3, 72))
    short = {**content, "data/0": content["data/0"][: 72 * 4]}
    with pytest.raises(ValueError, match="out of bounds"):
        read_embeds(in_base64(archive(short)))
    build = content["data.pkl"].replace(b"Rq\x0b.", b"R}b.")
    assert build != content["data.pkl"]
    with pytest.raises(ValueError, match="not a tensor saved by"):
        read_embeds(in_base64(archive({**content, "data.pkl": build})))


_SHARING = b")" + b"q\x00h\x00\x86" * 20
"""A tuple that holds another twice, twenty times over: hashing it takes a million steps."""
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n%bX\x03\x00\x00\x00cpuK\x01t"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE % b"X\x01\x00\x00\x000" + b"Q"


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (b"}" + _SHARING + b"Ns.", "other names than text and numbers"),
        (b"}(" + _SHARING + b"Nu.", "other names than text and numbers"),
        (b"}" + b")" + b"\x85" * 1000 + b"Ns.", "other names than text and numbers"),
        (b"(" + _SHARING + b"Nd.", "does not write the operation"),
        (b"\x8f(" + _SHARING + b"\x90.", "does not write the operation"),
        (_STORAGE % _SHARING + b"Q.", "the name of a storage is not text"),
        (b"\x96" + struct.pack("<Q", 1 << 62) + b".", "does not write the operation"),
        (b"ccollections\nOrderedDict\n]\x85R.", "argument"),
        (b"]" * 200_000 + b".", "more than 131,072 bytes"),
        (b"c" + b"a" * 100_000 + b"\nb\n.", "a" * 200 + "$"),
        (_TENSOR + b"K\x00(" + b"K\x01" * 17 + b"t(" + b"K\x01" * 17 + b"ttR.", "17 dimensions"),
        (_TENSOR + b"K\x00)" + b"N" * 500 + b"tR.", "argument"),
    ],
)
def test_a_short_archive_takes_neither_time_nor_memory(operations: bytes, message: str) -> None:
    content = {**contents(torch.ones(3, 72)), "data.pkl": b"\x80\x02" + operations}
    with pytest.raises(ValueError, match=f"not a tensor saved by torch.save: .*{message}"):
        read_embeds(in_base64(archive(content)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(protocol: int) -> None:
    tensor = torch.randn(4, 72)
    several = OrderedDict({"a": tensor, 3: [tensor, {"b": (1, 2.5, None, True, 10**12)}]})
    for value in (tensor, {str(i): torch.ones(2) for i in range(300)}, several):
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_protocol=protocol)
        found = read_saved(buffer.getvalue())
        torch.testing.assert_close(found, value, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_tensors_are_read(dtype: torch.dtype) -> None:
    value = torch.randn(5, 144, dtype=dtype)
    negated = torch._neg_view(value)  # as x.conj().imag is, too: the file has the values of value
    for one in (value, value[1:4, ::2], value.T, torch.nn.Parameter(value), value[:0], negated):
        assert torch.equal(read_embeds(encoded(one)), one)


def test_it_is_off_by_default(http: httpx.Client) -> None:
    message = refused(http, prompt_embeds=encoded(torch.ones(3, 72)))
    assert "started without --enable-prompt-embeds" in message
