"""The field ``hidden_states`` of a request: the rows of ``LLM.extract``, bit for bit."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.hidden_states import ExtractRequest, HiddenStatesDataset, HiddenStatesSample
from vllm.hidden_states.verify import verify_dataset

IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(71, [9, 40, 1, 17], 250)]
NUMPY = {"float32": "<f4", "int32": "<i4", "bool": "?"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server without a connector, whose limits are small."""
    settings = ServerSettings(max_inline_hidden_states_mib=0.1, max_hidden_states_mib=0.2)
    folder = tmp_path_factory.mktemp("plain")
    with live_server(tiny_llama, folder, layers=None, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def filing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a folder for files, from which clients download."""
    folder = tmp_path_factory.mktemp("filing")
    settings = ServerSettings(
        max_inline_hidden_states_mib=0.01,
        hidden_states_folder=str(folder / "files"),
        enable_hidden_states_download=True,
    )
    with live_server(tiny_llama, folder, layers=None, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        yield llm


def folder_of(server: LiveServer) -> Path:
    assert server.state.store is not None
    return Path(server.state.store.folder)


def decoded(tensor: dict[str, Any]) -> torch.Tensor:
    data, dtype = base64.b64decode(tensor["data"]), tensor["dtype"]
    if dtype in NUMPY:
        found = torch.from_numpy(np.frombuffer(data, NUMPY[dtype]).copy())
    else:
        found = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return found.reshape(tensor["shape"])


def post(server: LiveServer, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(body: dict[str, Any], expected: HiddenStatesSample) -> None:
    assert body["layers"] == list(expected.layer_ids)
    assert body["positions"] == expected.positions.tolist()
    assert body["tensors"].keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        found = decoded(body["tensors"][name])
        assert found.dtype == tensor.dtype
        assert torch.equal(found.float().nan_to_num(9), tensor.float().nan_to_num(9)), name


@pytest.mark.parametrize(
    "asked",
    [
        {"layers": [1, "norm", -1, 1]},
        {"layers": "0:4:2,last", "positions": "every:3", "dtype": "bfloat16"},
        {"layers": 2, "positions": "last", "top_logprobs": 5, "logprob_temperature": 1.5},
        {"layers": [3], "pooling": "mean"},
        {"layers": [3], "pooling": "last", "dtype": "fp8"},
        {"layers": "embed", "positions": [0, -1, 0], "top_logprobs": 3},
    ],
)
def test_rows_are_those_of_extract(
    asked: dict[str, Any], plain: LiveServer, reference: LLM
) -> None:
    answer = post(plain, prompt=IDS, hidden_states=asked, return_token_ids=True)
    request = {k: v for k, v in asked.items() if k != "pooling"}
    prompts = [ExtractRequest({"prompt_token_ids": ids}, **request) for ids in IDS]
    expected = reference.extract(prompts, pooling=asked.get("pooling", "none"))
    assert len(answer["choices"]) == len(IDS)
    for choice, sample in zip(answer["choices"], expected, strict=True):
        check(choice["hidden_states"], sample)
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert choice["prompt_token_ids"] == sample.token_ids.tolist()
    assert answer["usage"]["prompt_tokens"] == sum(map(len, IDS))
    assert answer["usage"]["completion_tokens"] == 0


def test_in_chats_and_in_vllm_xargs(plain: LiveServer, reference: LLM) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    asked = {"layers": [2], "top_logprobs": 4}
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 0}
    one = post(plain, CHAT, **body, hidden_states=asked)
    two = post(plain, CHAT, **body, vllm_xargs={"hidden_states": asked, "other": 1})
    (sample,) = reference.extract({"prompt_token_ids": one["prompt_token_ids"]}, **asked)
    for answer in (one, two):
        check(answer["choices"][0]["hidden_states"], sample)
        assert answer["choices"][0]["message"]["content"] == ""
    assert two["warnings"] == ["the field 'vllm_xargs.other' is not known and has no effect"]


@pytest.mark.parametrize("positions", ["all", "generated", "last", [0, -1]])
def test_rows_of_generated_tokens(positions: Any, plain: LiveServer, reference: LLM) -> None:
    """A completion with rows is the completion that it is without, and the rows are extract()'s."""
    settings = {"n": 2, "max_tokens": 6, "temperature": 1.1, "seed": 7, "logprobs": 2}
    settings |= {"ignore_eos": True}
    asked = {"layers": [2, "norm"], "positions": positions, "top_logprobs": 3}
    body = {"prompt": IDS[:2], "return_token_ids": True, **settings}
    answer = post(plain, hidden_states=asked, **body)
    without = post(plain, **body)
    prompts = [{"prompt_token_ids": ids} for ids in IDS[:2]]
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    expected = list(reference.extract(prompts, **asked, sampling_params=params))
    assert len(answer["choices"]) == len(expected) == 4
    for choice, plain_choice, sample in zip(
        answer["choices"], without["choices"], expected, strict=True
    ):
        rows = choice.pop("hidden_states")
        check(rows, sample)
        assert rows["num_prompt_tokens"] == sample.num_prompt_tokens
        assert choice == plain_choice
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        assert ids == sample.token_ids.tolist()
    assert answer["usage"] == without["usage"]


def test_a_chat_with_a_stop_string(plain: LiveServer, reference: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = post(plain, CHAT, **body)["choices"][0]["message"]["content"]
    body |= {"stop": text[3:5], "return_token_ids": True}
    asked = {"layers": [1]}
    answer = post(plain, CHAT, hidden_states=asked, **body)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[:3]
    ids = [*answer["prompt_token_ids"], *choice["token_ids"]]
    (sample,) = reference.extract({"prompt_token_ids": ids}, [1])
    is_output = torch.arange(len(ids)) >= len(answer["prompt_token_ids"])
    sample = sample.with_tensors(loss_mask=is_output)
    check(choice["hidden_states"], sample)
    with plain.client() as http:
        streamed = http.post(
            CHAT, json={**body, "hidden_states": {**asked, "delivery": "safetensors"}}
        )
    tensors = load(streamed.content)
    assert tensors["token_ids"].tolist() == ids
    assert torch.equal(tensors["hidden_states"], sample.hidden_states)
    check_folder({"a": streamed.content}, [sample], tmp_path)
    (read,) = HiddenStatesDataset(tmp_path)
    assert read.token_ids[read.num_prompt_tokens :].tolist() == choice["token_ids"]


def test_hooks(plain: LiveServer, reference: LLM) -> None:
    asked = {"hooks": ["blocks.1.hook_attn_out", "model.layers.2.mlp"], "positions": "every:2"}
    answer = post(plain, prompt=IDS[1], hidden_states=asked)
    (sample,) = reference.extract({"prompt_token_ids": IDS[1]}, **asked)
    body = answer["choices"][0]["hidden_states"]
    for name, tensor in sample.activations.items():
        assert torch.equal(decoded(body["tensors"][name]), tensor)
    assert set(sample.activations) == set(asked["hooks"])


def test_openai_s_client(plain: LiveServer, reference: LLM) -> None:
    asked = {"layers": ["norm"], "positions": "mask", "mask": [True, False, True]}
    with plain.openai() as client:
        answer = client.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=0, extra_body={"hidden_states": asked}
        )
    request = ExtractRequest({"prompt_token_ids": [5, 6, 7]}, **asked)
    (sample,) = reference.extract(request)
    check(answer.choices[0].model_extra["hidden_states"], sample)


def test_plain_requests_are_as_before(plain: LiveServer) -> None:
    answer = post(plain, prompt=[5, 6], max_tokens=2, temperature=0)
    assert "hidden_states" not in answer["choices"][0]
    asked = {"layers": 1}
    with plain.client() as http:
        body = {"prompt": [5, 6], "max_tokens": 2}
        plain_request = http.post(f"{COMPLETIONS}/render", json=body).json()
        rendered = http.post(f"{COMPLETIONS}/render", json={**body, "hidden_states": asked}).json()
    for one in (*plain_request, *rendered):
        one.pop("request_id")
    assert rendered == plain_request


def test_as_the_body_of_the_reply(plain: LiveServer, reference: LLM, tmp_path: Path) -> None:
    asked = {"layers": [0, 4], "top_logprobs": 2, "positions": "every:2", "dtype": "bfloat16"}
    body = {"prompt": IDS[1], "hidden_states": {**asked, "delivery": "safetensors"}}
    with plain.client() as http:
        answer = http.post(COMPLETIONS, json=body)
        two = http.post(COMPLETIONS, json={**body, "prompt": IDS[:2]})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert int(answer.headers["content-length"]) == len(answer.content)
    (sample,) = reference.extract({"prompt_token_ids": IDS[1]}, **asked)
    tensors = load(answer.content)
    for name, tensor in sample.tensors.items():
        assert torch.equal(tensors[name].nan_to_num(9), tensor.nan_to_num(9))
    check_folder({"a": answer.content}, [sample], tmp_path)
    assert two.status_code == 400
    assert 'delivery="safetensors" with 2 prompts' in two.json()["error"]["message"]


def check_folder(files: dict[str, bytes], samples: list[HiddenStatesSample], folder: Path) -> None:
    """Files of replies are a dataset that the reader takes."""
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    assert list(verify_dataset(str(folder))) == []
    for found, expected in zip(HiddenStatesDataset(folder), samples, strict=True):
        assert found.layer_ids == expected.layer_ids
        assert torch.equal(found.positions, expected.positions)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert found.tensors.keys() == expected.tensors.keys()


@pytest.mark.parametrize("delivery", ["auto", "file"])
def test_files_are_downloaded(
    delivery: str, filing: LiveServer, reference: LLM, tmp_path: Path
) -> None:
    asked = {"layers": [0, 2, "norm"], "top_logprobs": 3}
    ids = IDS[:2] if delivery == "file" else [IDS[1] * 3, IDS[0]]
    answer = post(filing, prompt=ids, hidden_states={**asked, "delivery": delivery})
    samples = list(reference.extract([{"prompt_token_ids": one} for one in ids], **asked))
    content = {}
    for index, choice in enumerate(answer["choices"]):
        body = choice["hidden_states"]
        assert "tensors" not in body
        path = Path(body["hidden_states_path"])
        content[str(index)] = httpx.get(body["hidden_states_url"]).content
        assert content[str(index)] == path.read_bytes()
        assert httpx.delete(body["hidden_states_url"]).status_code == 204
        assert not path.exists()
    check_folder(content, samples, tmp_path)
    assert list(folder_of(filing).iterdir()) == []


def test_small_results_stay_in_the_reply(filing: LiveServer, reference: LLM) -> None:
    answer = post(filing, prompt=IDS[2], hidden_states={"layers": [1]})
    (sample,) = reference.extract({"prompt_token_ids": IDS[2]}, [1])
    check(answer["choices"][0]["hidden_states"], sample)


def test_the_quota_counts_for_what_becomes_a_file(
    filing: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filing.state.store, "quota_bytes", 0)
    large = {"prompt": IDS[1] * 4, "hidden_states": {"layers": [0, 2, 4]}}
    for body, status in (
        ({"prompt": IDS[2], "hidden_states": {"layers": [1]}}, 200),
        ({"prompt": IDS[2], "hidden_states": {"layers": [1], "delivery": "inline"}}, 200),
        ({"prompt": IDS[2], "hidden_states": {"layers": [1]}, "max_tokens": 1}, 200),
        ({"prompt": IDS[2], "hidden_states": {"layers": [1], "delivery": "safetensors"}}, 200),
        ({**large, "hidden_states": {"layers": [0, 2, 4], "delivery": "safetensors"}}, 200),
        ({"prompt": IDS[2], "hidden_states": {"layers": [1], "delivery": "file"}}, 507),
        (large, 507),
        ({**large, "stream": True}, 507),
    ):
        with filing.client() as http:
            assert http.post(COMPLETIONS, json=body).status_code == status, body
    assert list(folder_of(filing).iterdir()) == []


def test_names_of_files_are_safe(filing: LiveServer) -> None:
    asked = {"layers": [1], "delivery": "file"}
    answer = post(filing, prompt=[5, 6], hidden_states=asked, request_id="../../a/b c")
    path = Path(answer["choices"][0]["hidden_states"]["hidden_states_path"])
    assert path.parent == folder_of(filing)
    path.unlink()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"layers": "all"}, "layers: 'all' does not exist in a model of 4 layers"),
        ({}, "no layers are named"),
        ({"layers": [True]}, "body.hidden_states.layers.0"),
        ({"layers": [[1]]}, "body.hidden_states.layers.0"),
        ({"layers": {"a": 1}}, "body.hidden_states.layers:"),
        ({"layers": 1.5}, "body.hidden_states.layers:"),
        ({"layers": [1] * 5000}, "names more than"),
        ({"layers": 1, "positions": 3.5}, "body.hidden_states.positions:"),
        ({"layers": 1, "positions": [0, "x"]}, "body.hidden_states.positions.1"),
        ({"layers": 1, "positions": [99]}, "positions holds 99"),
        ({"layers": 1, "positions": [2**62]}, "positions holds"),
        ({"layers": 1, "positions": [0] * 100_000}, "--max-inline-hidden-states-mib"),
        ({"layers": 1, "positions": "mask"}, "mask"),
        ({"layers": 1, "mask": [1, 0]}, "mask: has to have a value for each of 3 tokens"),
        ({"layers": 1, "mask": [2, 0, 0]}, "body.hidden_states.mask.0"),
        ({"layers": 1, "mask": 110}, "body.hidden_states.mask:"),
        ({"layers": 1, "mask": "110"}, "mask='110'"),
        ({"layers": 1, "mask": "answers"}, "mask='answers': only a conversation has answers"),
        ({"layers": 1, "dtype": "int8"}, "body.hidden_states.dtype"),
        ({"layers": 1, "pooling": "max"}, "body.hidden_states.pooling"),
        ({"layers": 1, "pooling": "mean", "top_logprobs": 2}, "log-probabilities have no mean"),
        ({"layers": 1, "top_logprobs": "5"}, "body.hidden_states.top_logprobs"),
        ({"layers": 1, "top_logprobs": 308}, "the vocabulary has 307 tokens"),
        ({"layers": 1, "top_logprobs": 2000}, "body.hidden_states.top_logprobs"),
        ({"layers": 1, "logprob_temperature": 0}, "body.hidden_states.logprob_temperature"),
        ({"layers": 1, "delivery": "email"}, "body.hidden_states.delivery"),
        ({"layers": 1, "delivery": "file"}, "this server has no storage folder"),
        ({"layers": 1, "hooks": ["blocks.0.nowhere"]}, "blocks.0.nowhere"),
        ({"layers": 1, "logprob_temperature": 2.0}, "has no effect without top_logprobs"),
        ({"layers": 1, "hooks": "a"}, "body.hidden_states.hooks:"),
        ({"layers": 1, "hooks": [1]}, "body.hidden_states.hooks.0"),
        ({"layers": 1, "hooks": ["token_ids"]}, "hooks="),
        ({"layers": 1, "steering": []}, "body.hidden_states.steering"),
        (5, "body.hidden_states:"),
        ([], "body.hidden_states:"),
    ],
)
def test_wrong_values_are_named(body: Any, message: str, plain: LiveServer) -> None:
    with plain.client() as http:
        for sent in ({"hidden_states": body}, {"vllm_xargs": {"hidden_states": body}}):
            answer = http.post(COMPLETIONS, json={"prompt": [5, 6, 7], **sent})
            assert answer.status_code == 400, answer.text
            assert message.replace("body.", "") in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "n=2 with hidden_states: only with max_tokens above 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
        ({"max_tokens": 5, "temperature": 9}, "temperature=9"),
        ({"max_tokens": 400}, "ask for less"),
        ({"stream": True, "prompt": []}, "the prompt is empty"),
        ({"stream": True, "max_tokens": 400}, "ask for less"),
        ({"prompt_logprobs": 0}, "prompt_logprobs: not together"),
        ({"echo": True}, "echo: not together"),
        ({"kv_transfer_params": {}}, "kv_transfer_params: not together"),
        ({"priority": 2}, 'priority=2: has no effect with scheduling_policy="fcfs"'),
        ({"vllm_xargs": {"hidden_states": {}}}, "hidden_states is also in vllm_xargs"),
        ({"vllm_xargs": []}, "body.vllm_xargs"),
        ({"prompt": [999]}, "out of vocabulary"),
        ({"prompt": [5] * 600}, "maximum context length is 512"),
    ],
)
def test_fields_without_effect_are_refused(
    body: dict[str, Any], message: str, plain: LiveServer
) -> None:
    with plain.client() as http:
        asked = {"prompt": [5, 6, 7], "hidden_states": {"layers": 1}} | body
        answer = http.post(COMPLETIONS, json=asked)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("delivery", "option"),
    [("inline", "max-inline-hidden-states-mib"), ("safetensors", "max-hidden-states-mib")],
)
def test_too_much_is_refused_before_it_is_computed(
    delivery: str, option: str, plain: LiveServer
) -> None:
    before = plain.state.engine.stats.num_prompt_tokens
    asked = {"layers": ":", "top_logprobs": 100, "delivery": delivery}
    with plain.client() as http:
        body = {"prompt": [5] * 200, "hidden_states": asked}
        answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert f"(--{option})" in answer.json()["error"]["message"]
    assert plain.state.engine.stats.num_prompt_tokens == before


def test_the_sum_over_prompts_is_limited(plain: LiveServer) -> None:
    asked = {"layers": [0, 1]}
    with plain.client() as http:
        one = http.post(COMPLETIONS, json={"prompt": [[5] * 60], "hidden_states": asked})
        many = http.post(COMPLETIONS, json={"prompt": [[5] * 60] * 4, "hidden_states": asked})
    assert (one.status_code, many.status_code) == (200, 400)


def test_beside_other_requests(plain: LiveServer) -> None:
    """Bad requests do not hurt the good ones that run with them."""
    good = {"prompt": IDS[1], "hidden_states": {"layers": [1, 3]}}
    bad = {"prompt": IDS[1], "hidden_states": {"layers": 1, "positions": [99]}}
    text = {"prompt": IDS[0], "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    def send(body: dict[str, Any]) -> Any:
        with plain.client() as http:
            answer = http.post(COMPLETIONS, json=body)
        return answer.status_code, json.dumps(answer.json().get("choices"))

    alone = [send(body) for body in (good, bad, text)]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(send, [good, bad, text] * 8))
    assert [status for status, _ in alone] == [200, 400, 200]
    assert together == alone * 8


def test_a_client_that_leaves_ends_the_work(plain: LiveServer) -> None:
    prompts = [[5 + i] * 200 for i in range(120)]  # none is a prefix of another
    body = {"prompt": prompts, "hidden_states": {"layers": 1, "positions": "last"}}
    with plain.client() as http, pytest.raises(httpx.TimeoutException):
        http.post(COMPLETIONS, json=body, timeout=0.02)
    processor, deadline = plain.state.engine.output_processor, time.monotonic() + 30
    while plain.state.server_load or plain.call(processor.has_unfinished_requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    answer = post(plain, prompt=IDS[0], hidden_states={"layers": 1})
    assert answer["choices"][0]["hidden_states"]["positions"] == list(range(len(IDS[0])))


def test_a_server_with_a_connector_refuses(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": [5], "hidden_states": {"layers": 1}})
    assert answer.status_code == 400
    assert "gives rows to its KV connector" in answer.json()["error"]["message"]


def test_a_folder_beside_a_connector_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    settings = ServerSettings(hidden_states_folder=str(tmp_path / "own"))
    with (
        pytest.raises(ValueError, match=r"hidden_states_folder=.* has no effect"),
        live_server(tiny_llama, tmp_path, settings=settings),
    ):
        pass


def events_of(server: LiveServer, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
    with server.client() as http:
        answer = http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_have_rows_in_the_last_event_of_a_choice(path: str, plain: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": [IDS[0], IDS[2]]}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "Why?"}]}
    settings = {"n": 2, "max_tokens": 6, "temperature": 1.1, "seed": 7, "logprobs": True}
    if path == CHAT:
        settings["top_logprobs"] = 1
    asked = {"layers": [2, "norm"], "positions": "all", "top_logprobs": 3}
    body |= {**settings, "hidden_states": asked, "return_token_ids": True}
    whole = post(plain, path, **body)
    options = {"include_usage": True}
    *events, last = events_of(plain, path, **body, stream_options=options)
    assert last["usage"] == {**last["usage"], **whole["usage"]} and last["choices"] == []
    texts, rows = dict[int, str](), dict[int, Any]()
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in rows, "an event after the last one"
        part = choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + part
        assert ("hidden_states" in choice) is (choice["finish_reason"] is not None)
        if choice["finish_reason"] is not None:
            rows[choice["index"]] = choice["hidden_states"]
    for choice in whole["choices"]:
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert texts[choice["index"]] == text
        assert rows[choice["index"]] == choice["hidden_states"]
    assert len(events) > 2 * len(rows)


def test_streams_of_rows_alone_and_of_files(filing: LiveServer, reference: LLM) -> None:
    asked = {"layers": [1], "positions": []}
    (event,) = events_of(filing, prompt=IDS[0], hidden_states=asked)
    assert event["choices"][0]["finish_reason"] == "length"
    assert event["choices"][0]["hidden_states"]["positions"] == []
    file = {"layers": [1], "delivery": "file"}
    *_, event = events_of(filing, prompt=IDS[0], hidden_states=file, max_tokens=3)
    body = event["choices"][0]["hidden_states"]
    content = httpx.get(body["hidden_states_url"]).content
    assert load(content)["hidden_states"].shape[:2] == (len(IDS[0]) + 3, 1)
    assert httpx.delete(body["hidden_states_url"]).status_code == 204
    with filing.client() as http:
        one = {"layers": 1, "delivery": "safetensors"}
        answer = http.post(COMPLETIONS, json={"prompt": [5], "stream": True, "hidden_states": one})
    assert answer.status_code == 400
    assert "leave stream out" in answer.json()["error"]["message"]


def test_inline_rows_of_a_stream_are_limited_together(filing: LiveServer) -> None:
    """10 KiB of rows are small; what comes after them is in files."""
    asked = {"layers": [1]}
    events = events_of(filing, prompt=[IDS[1][:30]] * 3, hidden_states=asked, max_tokens=0)
    bodies = [event["choices"][0]["hidden_states"] for event in events]
    paths = [body["hidden_states_path"] for body in bodies if "hidden_states_path" in body]
    assert len(bodies) == 3 and len(paths) == 2
    for path in paths:
        Path(path).unlink()


MESSAGES = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A thing."},
    {"role": "user", "content": "And that?"},
    {"role": "assistant", "content": "Another one."},
]


@pytest.mark.parametrize("rule", ["answers", "last-answer", "last-answer,before"])
@pytest.mark.parametrize("positions", ["all", "mask"])
def test_masks_by_rule(rule: str, positions: str, plain: LiveServer, reference: LLM) -> None:
    asked = {"layers": [2], "positions": positions, "mask": rule}
    body = {"messages": MESSAGES, "add_generation_prompt": False, "hidden_states": asked}
    (choice,) = post(plain, CHAT, **body)["choices"]
    request = ExtractRequest({"messages": MESSAGES}, [2], positions, mask=rule)
    (expected,) = reference.extract([request])
    assert expected.loss_mask is not None and expected.loss_mask.any()
    check(choice["hidden_states"], expected)
    with_prompt = post(plain, CHAT, **{**body, "add_generation_prompt": None})
    found = decoded(with_prompt["choices"][0]["hidden_states"]["tensors"]["loss_mask"])
    assert int(found.sum()) == int(expected.loss_mask.sum())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"hidden_states": {"layers": 1, "mask": "answer"}}, "mask='answer'"),
        ({"max_tokens": 3}, "mask='answers': only requests that generate nothing"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens: not together with a rule"),
        ({"add_special_tokens": True}, "add_special_tokens: not together with a rule"),
    ],
)
def test_masks_by_rule_that_cannot_be(
    body: dict[str, Any], message: str, plain: LiveServer
) -> None:
    asked = {"messages": MESSAGES, "hidden_states": {"layers": 1, "mask": "answers"}} | body
    with plain.client() as http:
        answer = http.post(CHAT, json=asked)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_priorities(tiny_llama: Path, tmp_path: Path) -> None:
    """With one place to run in, requests of lower numbers overtake others."""
    options = {"scheduling_policy": "priority", "max_num_seqs": 1}
    with live_server(tiny_llama, tmp_path, layers=None, **options) as server:

        def run(priority: int) -> float:
            asked = {"layers": [1], "positions": "last"}
            body = {"prompt": [[5] * 400] * 20, "priority": priority, "hidden_states": asked}
            post(server, **body)
            return time.monotonic()

        with ThreadPoolExecutor(6) as threads:
            ends = list(threads.map(run, [9, 9, 9, 9, 9, -9]))
    assert ends[-1] < max(ends)
    assert sorted(ends).index(ends[-1]) < 3


def test_the_trainers_side_in_the_recipes(plain: LiveServer, reference: LLM) -> None:
    """The fragment runs as it stands, without anything of this package."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?localhost:8000.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert "vllm" not in code
    code = code.replace("http://localhost:8000", plain.url).replace("2,", "1,")
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    texts = ["A text.", "Another one, a little longer."]
    exec(code, {"texts": texts, "train_step": lambda *tensors: steps.append(tensors)})
    for sample in reference.extract(texts, [1, "norm"]):
        rows, token_ids = steps[sample.index]
        assert torch.equal(rows, sample.hidden_states)
        assert torch.equal(token_ids, sample.token_ids)
