"""Hidden states over HTTP: every choice's rows, bit for bit those of the offline engine."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import extraction_config, greedy, random_prompts, rows_of
from tests.entrypoints.live_server import LiveServer, live_server
from tests.entrypoints.test_streaming import events
from vllm import LLM
from vllm.entrypoints.openai.cli_args import ServerSettings

PATH = "hidden_states_path"


def offline_rows(llm: LLM, ids: list[int]) -> torch.Tensor:
    prompt: Any = {"prompt_token_ids": ids}
    return rows_of(llm.generate([prompt], greedy(1), use_tqdm=False)[0])


def check_file(params: dict[str, Any] | None, ids: list[int], llm: LLM) -> None:
    """The file of a reply holds ``ids`` and the rows that the offline engine has for them."""
    assert params is not None
    tensors = load_file(params[PATH])
    assert tensors["token_ids"].tolist() == ids
    assert torch.equal(tensors["hidden_states"], offline_rows(llm, ids))
    assert Path(params[PATH] + ".lock").exists()


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"max_tokens": 1} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_as_speculators_asks(client: openai.OpenAI, reference: LLM, storage: Path) -> None:
    ids = random_prompts(3, [90], 250)[0]["prompt_token_ids"]
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra["prompt_token_ids"] == ids
    params = answer.model_extra["kv_transfer_params"]
    check_file(params, ids, reference)
    name = Path(params[PATH]).relative_to(storage).name
    assert re.fullmatch(r"cmpl-[0-9a-f]{16}-0-[0-9a-f]{8}\.safetensors", name)


def test_every_prompt_and_every_choice_has_its_own_file(http: httpx.Client, reference: LLM) -> None:
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(4, [5, 60, 17], 250)]
    answer = post(http, prompt=prompts, n=2, max_tokens=3)
    assert answer["kv_transfer_params"] == answer["choices"][0]["kv_transfer_params"]
    paths = {choice["kv_transfer_params"][PATH] for choice in answer["choices"]}
    assert len(paths) == 6
    for index, choice in enumerate(answer["choices"]):
        check_file(choice["kv_transfer_params"], prompts[index // 2], reference)
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 1}
    response = http.post("/v1/chat/completions", json=chat | {"return_token_ids": True}).json()
    assert response["kv_transfer_params"] == response["choices"][0]["kv_transfer_params"]
    for choice in response["choices"]:
        check_file(choice["kv_transfer_params"], response["prompt_token_ids"], reference)
        name = Path(choice["kv_transfer_params"][PATH]).name
        assert re.fullmatch(r"[01]_chatcmpl-[0-9a-f]{16}-[0-9a-f]{8}\.safetensors", name)


def test_output_tokens_are_included_when_asked(http: httpx.Client, reference: LLM) -> None:
    asked = {"include_output_tokens": True, "unknown": 1}
    answer = post(
        http, prompt=[1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True,
        return_token_ids=True, kv_transfer_params=asked,
    )  # fmt: skip
    tokens = [1, 2, 3, *answer["choices"][0]["token_ids"]][:-1]
    check_file(answer["kv_transfer_params"], tokens, reference)


def test_a_stop_string_keeps_the_path(http: httpx.Client, reference: LLM) -> None:
    body = {"prompt": "stop", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = post(http, **body)["choices"][0]["text"]
    answer = post(http, **body, stop=text[2:4])
    assert answer["choices"][0]["finish_reason"] == "stop"
    ids = reference.get_tokenizer().encode("stop", add_special_tokens=True, verbose=False)
    check_file(answer["kv_transfer_params"], ids, reference)
    streamed = events(http, "/v1/completions", body | {"stop": text[2:4], "stream": True})
    check_file(streamed[-1]["kv_transfer_params"], ids, reference)


def test_rows_end_where_a_stop_string_does(
    server: LiveServer, http: httpx.Client, reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [7, 8, 9], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}
    stop = post(http, **body)["choices"][0]["text"][2:4]
    monkeypatch.setattr(server.state.engine, "_send_soon", lambda command: None)  # or too late
    answer = post(http, **body, stop=stop)
    token_ids = answer["choices"][0]["token_ids"]
    assert len(token_ids) < 12
    check_file(answer["kv_transfer_params"], [7, 8, 9, *token_ids[:-1]], reference)


@pytest.mark.parametrize("with_usage", [False, True])
def test_the_last_chunk_of_a_stream_carries_it(
    http: httpx.Client, reference: LLM, with_usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = {"prompt": [[9, 8, 7], [6, 5]], "max_tokens": 3, "stream": True} | options
    chunks = events(http, "/v1/completions", body)
    own = {
        choice["index"]: choice["kv_transfer_params"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    }
    check_file(own[0], [9, 8, 7], reference)
    check_file(own[1], [6, 5], reference)
    assert chunks[-1]["kv_transfer_params"] == own[0]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    last = events(http, "/v1/chat/completions", chat | options)[-1]
    assert Path(last["kv_transfer_params"][PATH]).exists()


@pytest.mark.parametrize(
    "request_id",
    ["x/../../y", "../up", "/abs", "a\x00b", "..", ".", "ü" * 300, "a" * 100_000, " ", "con\n"],
)
def test_request_ids_cannot_leave_the_folder(
    http: httpx.Client, storage: Path, request_id: str
) -> None:
    around = {path.name for path in storage.parent.iterdir()}
    answer = post(http, prompt=[1, 2], request_id=request_id)
    assert answer["id"] == f"cmpl-{request_id}"
    assert Path(answer["kv_transfer_params"][PATH]).resolve().parent == storage.resolve()
    assert {path.name for path in storage.parent.iterdir()} == around
    again = post(http, prompt=[3], request_id=request_id)
    assert again["kv_transfer_params"][PATH] != answer["kv_transfer_params"][PATH]


def test_no_other_field_leads_out_of_the_folder(
    http: httpx.Client, storage: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.safetensors"
    for path in (str(target), f"../{target.name}", "..", ""):
        answer = post(
            http, prompt=[1, 2], cache_salt=str(target), user=str(target),
            kv_transfer_params={"hidden_states_path": path},
        )  # fmt: skip
        assert Path(answer["kv_transfer_params"][PATH]).resolve().parent == storage.resolve()
    assert not target.exists() and not (storage.parent / target.name).exists()


def test_concurrent_requests_get_their_own_rows(server: LiveServer, reference: LLM) -> None:
    """48 at a time, of 1 to 500 tokens; every tenth client leaves without its answer."""
    rng = random.Random(7)
    lengths = [rng.choice([1, 2, 15, 16, 17, 100, 333, 500]) for _ in range(96)]
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(8, lengths, 250)]

    def ask(index: int) -> dict[str, Any] | None:
        timeout = 0.02 if index % 10 == 0 else 60.0
        with httpx.Client(base_url=server.url, timeout=timeout, trust_env=False) as client:
            try:
                return post(client, prompt=prompts[index])
            except httpx.TimeoutException:
                return None

    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    assert all(answer is not None for index, answer in enumerate(answers) if index % 10)
    for answer, ids in zip(answers, prompts, strict=True):
        if answer is not None:
            check_file(answer["kv_transfer_params"], ids, reference)
    with server.client() as http:
        assert http.get("/load").json() == {"server_load": 0}
    stats = server.state.engine.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_addresses_stand_beside_paths(tiny_llama: Path, tmp_path: Path, reference: LLM) -> None:
    settings = ServerSettings(enable_hidden_states_download=True, hidden_states_quota_gib=2e-5)
    with live_server(tiny_llama, tmp_path, settings=settings) as server, server.client() as http:
        answer = post(http, prompt=[[1, 2, 3], [4]])
        for choice, ids in zip(answer["choices"], [[1, 2, 3], [4]], strict=True):
            params = choice["kv_transfer_params"]
            response = http.get(params["hidden_states_url"])
            assert response.status_code == 200
            assert response.content == Path(params[PATH]).read_bytes()
            check_file(params, ids, reference)
        streamed = events(http, "/v1/completions", {"prompt": [5] * 30, "stream": True})
        assert "hidden_states_url" in streamed[-1]["kv_transfer_params"]
        full = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert full.status_code == 507 and "quota" in full.json()["error"]["message"]


def test_who_wants_no_file_needs_no_room(tiny_llama: Path, tmp_path: Path, reference: LLM) -> None:
    """Files in a subfolder fill the quota; then only requests that would write are refused."""
    settings = ServerSettings(hidden_states_quota_gib=1e-6)
    options = {"extract_only_when_asked": True, "allow_custom_save_path": "inside"}
    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    with (
        live_server(tiny_llama, tmp_path, settings=settings, connector=options) as server,
        server.client() as http,
    ):
        asked = body | {"kv_transfer_params": {PATH: "sub/mine.bin"}}
        check_file(post(http, **asked)["kv_transfer_params"], [1, 2, 3], reference)
        for params in ({}, {PATH: "sub/mine.bin"}):
            refused = http.post("/v1/completions", json=body | {"kv_transfer_params": params})
            assert refused.status_code == 507
        assert post(http, **body)["kv_transfer_params"] is None
        several = body | {"n": 2, "temperature": 1.0}
        assert len(post(http, **several)["choices"]) == 2


@pytest.mark.parametrize("several", [{"n": 2, "temperature": 1.0}, {"prompt": [[1, 2], [3]]}])
def test_one_path_for_several_files(
    tiny_llama: Path, tmp_path: Path, reference: LLM, several: dict[str, Any]
) -> None:
    """It is refused before anything runs, and leaves nothing; the path is free again."""
    body = {"prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": {PATH: "mine"}}
    options = {"allow_custom_save_path": "inside"}
    with (
        live_server(tiny_llama, tmp_path, connector=options) as server,
        server.client() as http,
    ):
        refused = http.post("/v1/completions", json=body | several)
        assert refused.status_code == 400, refused.text
        assert "this request has 2 choices" in refused.json()["error"]["message"]
        assert list(tmp_path.iterdir()) == []
        check_file(post(http, **body)["kv_transfer_params"], [1, 2, 3], reference)


def test_files_of_a_multi_connector_can_be_fetched(
    tiny_llama: Path, tmp_path: Path, reference: LLM
) -> None:
    own = extraction_config([0, 2, 4], tmp_path / "rows")["kv_transfer_config"]
    blocks = {"shared_storage_path": str(tmp_path / "blocks")}
    other = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": blocks}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, own]},
    }
    settings = ServerSettings(enable_hidden_states_download=True)
    with (
        live_server(tiny_llama, tmp_path, settings=settings, kv_transfer_config=both) as server,
        server.client() as http,
    ):
        params = post(http, prompt=[5, 6, 7])["kv_transfer_params"]
        check_file(params, [5, 6, 7], reference)
        fetched = http.get(params["hidden_states_url"])
        assert fetched.content == Path(params[PATH]).read_bytes()


def test_the_state_after_the_norm(tiny_llama: Path, reference: LLM, tmp_path: Path) -> None:
    """A column of a file like any other, as the offline engine has it."""
    ids = random_prompts(6, [40], 250)[0]["prompt_token_ids"]
    layers: list[Any] = ["norm", 2]
    with live_server(tiny_llama, tmp_path, layers=layers) as server, server.client() as http:
        params = post(http, prompt=ids)["kv_transfer_params"]
        rows = load_file(params[PATH])["hidden_states"]
    with LLM(str(tiny_llama), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        (sample,) = llm.extract([{"prompt_token_ids": ids}], layers=layers)
    assert torch.equal(rows, sample.hidden_states)
    assert torch.equal(rows[:, 1], offline_rows(reference, ids)[:, 1])
