"""Adapters over HTTP: as the model of a body, and the endpoints that load and unload them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.entrypoints.test_hidden_states_field import decoded
from tests.models.adapters import request, write_adapter
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.hidden_states import ExtractRequest
from vllm.lora.request import LoRARequest

IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(72, [9, 40, 17], 250)]
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GREEDY: dict[str, Any] = {
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
LONG = GREEDY | {"max_tokens": 100}


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        write_adapter(path / name, tiny_llama, seed)
    return path


@pytest.fixture(scope="module")
def server(tiny_llama: Path, folder: Path) -> Iterator[LiveServer]:
    modules = [f"a={folder / 'a'}", json.dumps({"name": "b", "path": str(folder / "b")})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        settings = ServerSettings(lora_modules=modules)
        options: dict[str, Any] = {"layers": None, "settings": settings, "enable_lora": True}
        with live_server(tiny_llama, folder, **options) as running:
            yield running


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    with LLM(str(tiny_llama), enable_lora=True, **options) as llm:
        yield llm


def ask(server: LiveServer, method: str, path: str, **body: Any) -> tuple[int, str]:
    with server.client() as http:
        answer = http.request(method, path, json=body or None)
    return answer.status_code, answer.text


def post(server: LiveServer, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    status, answer = ask(server, "POST", path, **body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


def expected(llm: LLM, ids: list[int], adapter: LoRARequest | None) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, lora_request=adapter)
    return list(output.outputs[0].token_ids)


def test_a_model_is_an_adapter(server: LiveServer, reference: LLM, folder: Path) -> None:
    """Two of them and the plain model in one batch, streamed or not; the answer names it."""
    named = {"a": request(folder / "a", 1), "b": request(folder / "b", 2), "tiny": None}
    cases = [(name, ids) for name in named for ids in IDS]
    bodies = [{"model": name, "prompt": ids, **GREEDY} for name, ids in cases]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(server, **body), bodies))
    for (name, ids), answer in zip(cases, answers, strict=True):
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == expected(reference, ids, named[name])
    status, text = ask(server, "POST", COMPLETIONS, stream=True, **bodies[0])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and {event["model"] for event in events} == {"a"}
    streamed = [token for event in events for one in event["choices"] for token in one["token_ids"]]
    assert streamed == answers[0]["choices"][0]["token_ids"]


def test_endpoints_of_trl(server: LiveServer, reference: LLM, folder: Path) -> None:
    """Log-probabilities and generation by an adapter; an unknown model is refused there, too."""
    adapter, ids = request(folder / "a", 1), IDS[0]
    scored = {"sequences": [ids], "prompt_lengths": [1], "top_logprobs": 3, "zz": 1}
    prompt = {"prompt_token_ids": ids}
    for name, request_of_it in (("a", adapter), ("tiny", None)):
        options: dict[str, Any] = {"lora_request": request_of_it, "top_logprobs": 3}
        (sample,) = reference.extract([prompt], layers=0, **options)
        answer = post(server, "/get_sequence_logprobs/", model=name, **scored)
        assert [row[:3] for row in answer["logprob_token_ids"][0]] == (
            sample.tensors["top_token_ids"][:-1].tolist()
        )
        assert answer["warnings"] == ["the field 'zz' is not known and has no effect"]
        fields = {"max_tokens": 6, "temperature": 0, "generation_kwargs": {"ignore_eos": True}}
        answer = post(server, "/generate/", model=name, prompts=[ids], **fields)
        assert answer["completion_ids"] == [expected(reference, ids, request_of_it)]
    messages = [[{"role": "user", "content": "hi"}]]
    for path, body in (
        ("/get_sequence_logprobs/", scored),
        ("/generate/", {"prompts": [ids]}),
        ("/chat/", {"messages": messages}),
    ):
        assert ask(server, "POST", path, model="zz", **body)[0] == 404, path


def test_rows_and_vectors(server: LiveServer, reference: LLM, folder: Path) -> None:
    """Rows of prompts and of generated text, and vectors of prompts."""
    adapter, prompt = request(folder / "a", 1), {"prompt_token_ids": IDS[1]}
    (sample,) = reference.extract([prompt], layers=[2, 4], lora_request=adapter)
    wanted = {"layers": [2, 4], "delivery": "inline"}
    for more in ({"max_tokens": 0}, GREEDY):
        answer = post(server, model="a", prompt=IDS[1], hidden_states=wanted, **more)
        rows = decoded(answer["choices"][0]["hidden_states"]["tensors"]["hidden_states"])
        assert torch.equal(rows[: len(IDS[1])], sample.hidden_states)
    (vector,) = reference.embed([ExtractRequest(prompt, lora_request=adapter)])
    for name in ("a", "tiny"):
        answer = post(server, EMBEDDINGS, model=name, input=IDS[1])
        found = answer["data"][0]["embedding"]
        assert answer["model"] == name
        same = np.allclose(found, vector.outputs.embedding, atol=1e-6)
        assert same == (name == "a")


def test_models_are_listed(server: LiveServer, folder: Path) -> None:
    with server.client() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert list(cards)[:4] == ["tiny", "also-tiny", "a", "b"]
        assert cards["a"]["parent"] == "tiny" and cards["a"]["root"] == str(folder / "a")
        assert cards["tiny"]["parent"] is None
        assert http.get("/v1/models/b").json() == cards["b"]
        assert http.get("/v1/models/x").status_code == 404


def test_adapters_come_and_go(server: LiveServer, reference: LLM, folder: Path) -> None:
    """A request under way keeps its adapter; a name may come back with another one."""
    path = str(folder / "c")
    missing = ask(server, "POST", COMPLETIONS, model="c", prompt=IDS[0], **GREEDY)
    assert missing[0] == 404 and "The model `c` does not exist" in missing[1]
    for number, name in enumerate("ca"):
        body = {"lora_name": "c", "lora_path": str(folder / name)}
        assert ask(server, "POST", LOAD, **body) == (
            200, "Success: LoRA adapter 'c' added successfully."
        )  # fmt: skip
        answer = post(server, model="c", prompt=IDS[0], **GREEDY)
        adapter = request(folder / name, 10 + number)
        assert answer["choices"][0]["token_ids"] == expected(reference, IDS[0], adapter)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(post, server, model="c", prompt=IDS[1], **LONG)
            while not server.state.server_load and not running.done():
                pass
            assert ask(server, "POST", UNLOAD, lora_name="c") == (
                200, "Success: LoRA adapter 'c' removed successfully."
            )  # fmt: skip
            tokens = running.result()["choices"][0]["token_ids"]
        assert tokens[:6] == expected(reference, IDS[1], adapter)
    for endpoint, body, status, message in (
        (LOAD, {"lora_name": "a", "lora_path": path}, 400, "'a' has already been loaded"),
        (LOAD, {"lora_name": "tiny", "lora_path": path}, 400, "'tiny' has already been loaded"),
        (LOAD, {"lora_name": "d", "lora_path": "/nowhere"}, 400, "it is not a folder"),
        (LOAD, {"lora_name": "", "lora_path": path}, 400, "lora_name=''"),
        (LOAD, {"lora_name": "d"}, 400, "lora_path"),
        (UNLOAD, {"lora_name": "d"}, 404, "'d' cannot be found"),
    ):
        found = ask(server, "POST", endpoint, **body)
        assert found[0] == status and message in found[1], found
    assert post(server, model="a", prompt=IDS[0], **GREEDY)


@pytest.mark.exhaustive
def test_what_is_off(
    tiny_llama: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints without the variable; adapters without the option, or that cannot be used."""
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    with live_server(tiny_llama, tmp_path, layers=None) as running:
        assert ask(running, "POST", LOAD, lora_name="a", lora_path=str(folder / "a"))[0] == 404
    for options, item, message in (
        ({}, f"a={folder / 'a'}", "without enable_lora=True"),
        ({"enable_lora": True}, "a=/nowhere", "it is not a folder"),
        ({"enable_lora": True}, '{"name": "a"}', "an object has a name and a path"),
    ):
        settings = ServerSettings(lora_modules=[item])
        arguments: Any = {"layers": None, "settings": settings, **options}
        with (
            pytest.raises(ValueError, match=message),
            live_server(tiny_llama, tmp_path, **arguments),
        ):
            pass
    with pytest.raises(ValueError, match="lora_modules="):
        ServerSettings(lora_modules=["a"])


def test_folders_that_change_while_a_request_waits(
    server: LiveServer, reference: LLM, folder: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """It came before its adapter was unloaded, and had what the folder held at the end."""
    path = tmp_path / "waits"
    for is_changed in (False, True):
        write_adapter(path, tiny_llama, 5)
        right = expected(reference, IDS[0], request(path, 20))
        assert ask(server, "POST", LOAD, lora_name="waits", lora_path=str(path))[0] == 200
        engine = server.state.engine
        run = partial(asyncio.run_coroutine_threadsafe, loop=server.loop)
        run(engine.pause_generation("keep")).result()
        with ThreadPoolExecutor(1) as pool:
            body = {"model": "waits", "prompt": IDS[0], **GREEDY}
            answer = pool.submit(ask, server, "POST", COMPLETIONS, **body)
            while not server.state.server_load and not answer.done():
                pass
            assert ask(server, "POST", UNLOAD, lora_name="waits")[0] == 200
            if is_changed:
                write_adapter(path, tiny_llama, 6)
            run(engine.resume_generation()).result()
            status, text = answer.result()
        if is_changed:
            assert status == 400 and "have changed since they were read first" in text
        else:
            assert json.loads(text)["choices"][0]["token_ids"] == right
