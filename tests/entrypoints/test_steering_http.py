"""Steering over HTTP: the values of ``LLM``, inline and by name; the endpoints of named vectors."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from vllm import LLM, SamplingParams, SteeringVector
from vllm.entrypoints.openai.cli_args import ServerSettings

IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(72, [9, 40, 17], 250)]
WIDTH = 72
DRAWN = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(8)) * 4
COMPLETIONS, CHAT, NAMED = "/v1/completions", "/v1/chat/completions", "/v1/steering_vectors"
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("steered")
    path = folder / "a.safetensors"
    safetensors.torch.save_file({"layers.1": DRAWN[0], "layers.3": DRAWN[1].clone()}, path)
    settings = ServerSettings(
        steering_vectors=[f"calm={path}"],
        enable_steering_uploads=True,
        max_steering_vectors=3,
        max_steering_mib=5 * WIDTH * 4 / 2**20,
    )
    with live_server(tiny_llama, folder, layers=None, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        yield llm


def as_json(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "data": base64.b64encode(data).decode(),
        "shape": list(tensor.shape),
        **({} if dtype == "float32" else {"dtype": dtype}),
    }


def ask(server: LiveServer, method: str, path: str, **body: Any) -> tuple[int, Any]:
    with server.client() as http:
        answer = http.request(method, path, json=body or None)
    return answer.status_code, answer.json()


def post(server: LiveServer, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    status, answer = ask(server, "POST", path, **body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def expected(llm: LLM, ids: list[int], *steering: SteeringVector) -> list[int]:
    params = SamplingParams(
        max_tokens=6, temperature=0, ignore_eos=True, steering=list(steering) or None
    )
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    return list(output.outputs[0].token_ids)


WAYS: list[tuple[Any, list[SteeringVector]]] = [
    ({"vectors": as_json(DRAWN[0]), "layers": 2}, [SteeringVector(DRAWN[0], 2)]),
    (
        [{"vectors": as_json(DRAWN[:2].bfloat16()), "layers": [1, 4], "scale": 0.5}, "calm"],
        [
            SteeringVector(DRAWN[:2].bfloat16(), [1, 4], 0.5),
            SteeringVector(DRAWN[:2], [1, 3]),
        ],
    ),
    (
        {"name": "calm", "scale": -2, "positions": "generated", "norm_match": True},
        [SteeringVector(DRAWN[:2], [1, 3], -2, "generated", True)],
    ),
    (
        {"vectors": as_json(DRAWN[None, 1:3].half()), "layers": [3], "positions": [7, 2]},
        [SteeringVector(DRAWN[None, 1:3].half(), [3], positions=[7, 2])],
    ),
]


def test_requests_are_steered_as_by_llm(server: LiveServer, reference: LLM) -> None:
    """In one batch with others; in the body or vllm_xargs; streamed or not."""
    plain = [expected(reference, ids) for ids in IDS]
    bodies, wanted = [], []
    for steering, vectors in [*WAYS, (None, [])]:
        for index, ids in enumerate(IDS):
            field = {"steering": steering}
            bodies.append({"prompt": ids, **GREEDY, **field})
            bodies.append({"prompt": ids, **GREEDY, "vllm_xargs": {**field}})
            wanted += [expected(reference, ids, *vectors) if vectors else plain[index]] * 2
    assert len({tuple(ids) for ids in wanted}) > 2 * len(IDS)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: post(server, **body), bodies))
    for body, answer, ids in zip(bodies, answers, wanted, strict=True):
        assert answer["choices"][0]["token_ids"] == ids, body
        assert "warnings" not in answer
    for steering, vectors in WAYS:
        with server.client() as http:
            body = {"prompt": IDS[1], **GREEDY, "steering": steering, "stream": True}
            lines = http.post(COMPLETIONS, json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ids = [one for event in events for one in event["choices"][0]["token_ids"]]
        assert ids == expected(reference, IDS[1], *vectors)


def test_chats_and_rows(server: LiveServer, reference: LLM) -> None:
    """Rows of the prompt alone and with output, beside ``steering``."""
    steering, vectors = WAYS[1]
    messages = [{"role": "user", "content": "Why?"}]
    answer = post(server, CHAT, messages=messages, steering=steering, **GREEDY)
    prompt = answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == expected(reference, prompt, *vectors)
    for more, params in (
        ({}, None),
        (GREEDY, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)),
    ):
        answer = post(
            server, prompt=IDS[0], steering=steering, hidden_states={"layers": [1, "norm"]}, **more
        )
        (sample,) = reference.extract(
            {"prompt_token_ids": IDS[0]},
            layers=[1, "norm"],
            steering=vectors,
            sampling_params=params,
        )
        tensor = answer["choices"][0]["hidden_states"]["tensors"]["hidden_states"]
        rows = torch.frombuffer(bytearray(base64.b64decode(tensor["data"])), dtype=torch.float32)
        assert torch.equal(rows.reshape(tensor["shape"]), sample.hidden_states)


def test_named_vectors(server: LiveServer, reference: LLM) -> None:
    """They are kept, listed, replaced and deleted; limits count all of them."""
    card = {"id": "calm", "object": "steering_vector", "layers": [1, 3], "width": WIDTH}
    card["bytes"] = 2 * WIDTH * 4
    status, found = ask(server, "GET", NAMED)
    assert status == 200
    assert [{**one, "created": 0} for one in found["data"]] == [{**card, "created": 0}]
    made = post(server, NAMED, name="x.1", vectors=as_json(DRAWN[2].bfloat16()), layers=2)
    assert (made["id"], made["layers"], made["bytes"]) == ("x.1", [2], WIDTH * 4)
    body = {"prompt": IDS[1], **GREEDY, "steering": "x.1"}
    first = expected(reference, IDS[1], SteeringVector(DRAWN[2].bfloat16(), 2))
    assert post(server, **body)["choices"][0]["token_ids"] == first
    post(server, NAMED, name="x.1", vectors=as_json(DRAWN[2:]), layers=[1, 2])
    second = expected(reference, IDS[1], SteeringVector(DRAWN[2:], [1, 2]))
    assert second != first
    assert post(server, **body)["choices"][0]["token_ids"] == second
    post(server, NAMED, name="y", vectors=as_json(DRAWN[3]), layers=[1])
    full = {"name": "z", "vectors": as_json(DRAWN[3]), "layers": 1}
    status, error = ask(server, "POST", NAMED, **full)
    assert status == 400 and "3 steering vectors are kept, and --max-steering-vectors is 3" in str(
        error
    )
    status, error = ask(server, "POST", NAMED, **{**full, "name": "y", "vectors": as_json(
        DRAWN[2:]), "layers": [1, 2]})  # fmt: skip
    assert status == 400 and "--max-steering-mib is" in str(error)
    for name in ("x.1", "y"):
        gone = {"id": name, "object": "steering_vector", "deleted": True}
        assert ask(server, "DELETE", f"{NAMED}/{name}") == (200, gone)
    assert ask(server, "GET", f"{NAMED}/y")[0] == 404
    status, error = ask(server, "POST", COMPLETIONS, **{**body, "steering": [{"name": "clam"}]})
    assert status == 404
    text = "steering vectors of the name 'clam' (did you mean 'calm'?): there are calm"
    assert error["error"]["message"] == text


def test_a_request_keeps_the_vectors_of_its_name(server: LiveServer, reference: LLM) -> None:
    """They are replaced and deleted while requests run."""
    post(server, NAMED, name="m", vectors=as_json(DRAWN[2]), layers=2)
    settings = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    params = SamplingParams(
        max_tokens=300,
        temperature=0,
        ignore_eos=True,
        steering=[SteeringVector(DRAWN[2], 2)],  # type: ignore[list-item]
    )
    (output,) = reference.generate({"prompt_token_ids": IDS[0]}, params)
    body = {"prompt": IDS[0], "steering": "m", "stream": True, **settings}
    ids: list[int] = []
    has_begun = threading.Event()

    def read() -> None:
        with server.client() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids.extend(json.loads(line[6:])["choices"][0]["token_ids"])
                    has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(30)
    post(server, NAMED, name="m", vectors=as_json(-9 * DRAWN[2]), layers=1)
    assert ask(server, "DELETE", f"{NAMED}/m")[0] == 200
    thread.join()
    assert ids == list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("steering", "status", "message"),
    [
        ("none", 404, "steering vectors of the name 'none': there are calm"),
        ({}, 400, "an object has a name, or vectors and layers"),
        ({"vectors": as_json(DRAWN[0])}, 400, "a name, or vectors and layers"),
        ({"name": "calm", "layers": [1]}, 400, "the name stands for vectors and layers"),
        ({"vectors": as_json(DRAWN[0]), "layers": 9}, 400, "layers=9: has to be a layer id from 0"),
        ({"vectors": as_json(DRAWN[0]), "layers": -1}, 400, "layers=-1: has to be a layer id"),
        ({"vectors": as_json(DRAWN[0, :8]), "layers": 1}, 400, "72 elements, as the stream has"),
        ({"vectors": as_json(DRAWN[0] / 0), "layers": 1}, 400, "has to be finite"),
        ({"vectors": as_json(DRAWN[0]), "layers": 1, "scale": 1e40}, 400, "scale=1e+40: has to be"),
        ({"name": "calm", "positions": "some"}, 400, "positions='some': has to be all, prompt"),
        ({"name": "calm", "positions": [-1]}, 400, "positions=[-1]: has to be"),
        ({"vectors": {"data": "AAAA", "shape": [1]}, "layers": 1}, 400, "data has 3 bytes"),
        ({"vectors": {"data": "", "shape": [0]}, "layers": 1}, 400, "at least one element"),
        ({"vectors": {"data": "?", "shape": [1]}, "layers": 1}, 400, "data is not base64"),
        ({"vectors": {"data": "", "shape": [1 << 62, 1 << 62]}, "layers": 1}, 400, "has 0 bytes"),
        ({"vectors": {"data": "", "shape": [-1]}, "layers": 1}, 400, "vectors.shape.0"),
        ({"vectors": as_json(DRAWN[0]), "layers": 1, "x": 1}, 400, "body.steering.x"),
        ([["calm"]], 400, "an object, or a name of vectors"),
        ("", 404, "of the name ''"),
        (7, 400, "an object, a name of vectors, or a list of them"),
        (["calm"] * 1025, 400, "at most 1024 items"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(
    steering: Any, status: int, message: str, server: LiveServer
) -> None:
    found, error = ask(server, "POST", COMPLETIONS, prompt=IDS[0], steering=steering, **GREEDY)
    assert found == status and message in error["error"]["message"], error
    stream = {"prompt": IDS[0], "steering": steering, **GREEDY, "stream": True}
    assert ask(server, "POST", COMPLETIONS, **stream)[0] == status


def test_uploads_that_cannot_be_used(server: LiveServer) -> None:
    good = {"name": "u", "vectors": as_json(DRAWN[0]), "layers": 1}
    for change, message in (
        ({"name": "../x"}, "name='../x': has to be at most 128 letters"),
        ({"layers": 5}, "layers=5: has to be a layer id from 0 to 4"),
        ({"layers": [1, 2]}, "a row for each of the 2 layers"),
        ({"vectors": as_json(DRAWN[0, :5])}, "72 elements"),
        ({"vectors": as_json(DRAWN[None])}, "4 different positions"),
        ({"vectors": None}, "body.vectors"),
    ):
        status, error = ask(server, "POST", NAMED, **{**good, **change})
        assert status == 400 and message in error["error"]["message"]
    assert ask(server, "DELETE", f"{NAMED}/none")[0] == 404
    both = {"steering": "calm", "vllm_xargs": {"steering": "calm"}}
    status, error = ask(server, "POST", COMPLETIONS, prompt=IDS[0], **GREEDY, **both)
    assert status == 400 and "also in vllm_xargs" in str(error)


def test_names_are_checked_in_an_empty_store(tiny_llama: Path, tmp_path: Path) -> None:
    body = {"vectors": as_json(DRAWN[0]), "layers": 1}
    settings = ServerSettings(enable_steering_uploads=True)
    with live_server(tiny_llama, tmp_path, layers=None, settings=settings) as empty:
        for name in ("../x", "a/b", "", "a" * 129, "a\n"):
            status, error = ask(empty, "POST", NAMED, name=name, **body)
            assert status == 400 and "at most 128 letters" in str(error)
        assert ask(empty, "GET", NAMED) == (200, {"object": "list", "data": []})


def test_uploads_are_off_by_default(tiny_llama: Path, tmp_path: Path) -> None:
    body = {"name": "u", "vectors": as_json(DRAWN[0]), "layers": 1}
    with live_server(tiny_llama, tmp_path, layers=None) as plain:
        for method, path, more in (("POST", NAMED, body), ("DELETE", f"{NAMED}/u", {})):
            status, error = ask(plain, method, path, **more)
            assert status == 403 and "--enable-steering-uploads" in str(error)
        assert ask(plain, "GET", NAMED) == (200, {"object": "list", "data": []})
        status, error = ask(plain, "POST", COMPLETIONS, prompt=IDS[0], steering="a")
        assert status == 404 and "'a': there are none" in str(error)
        body.pop("name")
        assert ask(plain, "POST", COMPLETIONS, prompt=IDS[0], steering=body)[0] == 200


@pytest.mark.parametrize(
    ("item", "message"),
    [("x", "write each as NAME=PATH"), ("a b=x.pt", "NAME=PATH"), ("a=/none.pt", "No such file")],
)
def test_files_of_the_command_line(item: str, message: str, server: LiveServer) -> None:
    from vllm.entrypoints.openai.steering_store import SteeringStore

    with pytest.raises(ValueError, match=message):
        SteeringStore(ServerSettings(steering_vectors=[item]), server.state.engine)


def test_names_of_the_command_line_that_come_twice(server: LiveServer) -> None:
    from vllm.entrypoints.openai.steering_store import SteeringStore

    (item,) = server.state.settings.steering_vectors
    with pytest.raises(ValueError, match="the name 'calm' comes twice"):
        SteeringStore(ServerSettings(steering_vectors=[item, item]), server.state.engine)


def of_lens(tensor: dict[str, Any]) -> torch.Tensor:
    """A tensor of a reply, by the format that vllm-lens documents."""
    assert tensor.keys() == {"data", "dtype", "original_dtype", "shape"}
    array = np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"])
    dtype = getattr(torch, tensor["original_dtype"].removeprefix("torch."))
    return torch.from_numpy(array.copy()).view(dtype).reshape(tensor["shape"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_options_of_vllm_lens(path: str, server: LiveServer, reference: LLM) -> None:
    """As its client sends them, JSON in texts of ``vllm_xargs``, and reads ``activations``."""
    steering = [
        {
            "activations": {**as_json(DRAWN[:2]), "dtype": "float32"},
            "layer_indices": [0, 2],
            "scale": 1.5,
            "norm_match": False,
            "position_indices": None,
        }
    ]
    own = [SteeringVector(DRAWN[:2], [1, 3], 1.5)]
    prompt = {"prompt": IDS[1]} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "Why?"}]
    }  # fmt: skip
    xargs = {
        "output_residual_stream": "[1, 3]",
        "apply_steering_vectors": json.dumps(steering),
        "activations_transport": "binary",
    }
    answer = post(server, path, **prompt, **GREEDY, vllm_xargs=xargs)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == expected(reference, ids, *own)
    rows = of_lens(answer["activations"]["residual_stream"])
    (sample,) = reference.extract(
        {"prompt_token_ids": ids},
        layers=[2, 4],
        steering=own,
        sampling_params=SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    )
    assert torch.equal(rows, sample.hidden_states[:-1].transpose(0, 1))
    name = "vllm_xargs.activations_transport"
    assert answer["warnings"] == [f"the field '{name}' is not known and has no effect"]
    xargs.pop("output_residual_stream")
    more = {"hidden_states": {"layers": [2]}, "steering": "calm"}
    answer = post(server, path, **prompt, **GREEDY, vllm_xargs=xargs, **more)
    (sample,) = reference.extract(
        {"prompt_token_ids": ids},
        layers=[2],
        steering=[SteeringVector(DRAWN[:2], [1, 3]), *own],
        sampling_params=SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    )
    tensor = answer["choices"][0]["hidden_states"]["tensors"]["hidden_states"]
    assert torch.equal(of_lens({**tensor, "original_dtype": "torch.float32"}), sample.hidden_states)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": True}, "not with stream=true, nor with several prompts"),
        ({"prompt": IDS[:2]}, "not with stream=true, nor with several prompts"),
        ({"n": 2, "temperature": 1}, "with n=2: ask for one answer"),
        ({"max_tokens": 490, "prompt": [5] * 9}, "the rows take up to 574,848 bytes, and at most"),
        ({"hidden_states": {"layers": [1]}}, "extract() returns the rows of its layers"),
        ({"vllm_xargs": {"output_residual_stream": [4]}}, "a list of layers from 0 to 3"),
        ({"vllm_xargs": {"output_residual_stream": 3}}, "body.vllm_xargs.output_residual_stream"),
        ({"vllm_xargs": {"output_residual_stream": 1}}, "body.vllm_xargs.output_residual_stream"),
        ({"vllm_xargs": {"apply_hooks": "[]"}}, "apply_hooks"),
        ({"vllm_xargs": {"output_qk": True}}, "queries and keys are not returned"),
        ({"vllm_xargs": {"apply_steering_vectors": "[1]"}}, "each has to have activations"),
    ],
)
def test_options_of_vllm_lens_that_cannot_be_served(
    body: dict[str, Any], message: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = dataclasses.replace(server.state.settings, max_inline_hidden_states_mib=0.5)
    monkeypatch.setattr(server.state, "settings", limited)
    given = {"prompt": IDS[0], **GREEDY, "vllm_xargs": {"output_residual_stream": True}, **body}
    status, error = ask(server, "POST", COMPLETIONS, **given)
    assert status == 400 and message in error["error"]["message"], error
    assert error["error"]["type"] in ("BadRequestError", "Bad Request")
