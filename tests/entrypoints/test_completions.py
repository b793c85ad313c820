"""/v1/completions: fields, defaults, values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.harness import greedy, random_prompts
from tests.entrypoints.live_server import live_server
from tests.models.checkpoints import NUM_BYTES, SPECIAL_TOKENS
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import ServerSettings

GREEDY = {"temperature": 0, "ignore_eos": True}


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def offline(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    return llm.generate([prompt], params, use_tqdm=False)[0]


def test_every_field_is_there(http: httpx.Client) -> None:
    answer = complete(http, prompt=[5, 6, 7], max_tokens=2)
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint"),
        *("usage", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert set(answer["choices"][0]) == {
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
        *("prompt_logprobs", "prompt_token_ids", "routed_experts", "kv_transfer_params"),
    }
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-") and len(answer["id"]) == len("cmpl-") + 16
    choice = answer["choices"][0]
    assert choice["token_ids"] is None and choice["prompt_token_ids"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_tokens_are_those_of_the_offline_engine(http: httpx.Client, reference: LLM) -> None:
    for prompt in random_prompts(1, [1, 33, 170], vocabulary=250):
        ids = prompt["prompt_token_ids"]
        wanted = offline(reference, prompt, greedy(9)).outputs[0]
        answer = complete(http, prompt=ids, max_tokens=9, return_token_ids=True, **GREEDY)
        choice = answer["choices"][0]
        assert choice["token_ids"] == list(wanted.token_ids)
        assert choice["text"] == wanted.text
        assert choice["prompt_token_ids"] == ids


def test_text_lists_and_n_have_one_choice_each(http: httpx.Client, reference: LLM) -> None:
    texts = ["hello", "a longer text", "x"]
    answer = complete(http, prompt=texts, max_tokens=4, return_token_ids=True, **GREEDY)
    wanted = reference.generate(texts, greedy(4), use_tqdm=False)
    for index, (choice, one) in enumerate(zip(answer["choices"], wanted, strict=True)):
        assert choice["index"] == index
        assert choice["text"] == one.outputs[0].text
        assert choice["prompt_token_ids"] == one.prompt_token_ids
    prompt_tokens = sum(map(len, texts))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 12
    pairs = complete(http, prompt=[[1, 2], [3]], n=2, max_tokens=3, seed=5, return_token_ids=True)
    assert [choice["index"] for choice in pairs["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in pairs["choices"]] == [[1, 2]] * 2 + [[3]] * 2
    assert pairs["usage"]["prompt_tokens"] == 3
    again = complete(http, prompt=[[1, 2], [3]], n=2, max_tokens=3, seed=5, return_token_ids=True)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in pairs["choices"]]


def test_defaults(http: httpx.Client) -> None:
    answer = complete(http, prompt=[1, 2, 3], ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    clipped = complete(http, prompt=[1] * 500, max_tokens=512, ignore_eos=True)
    assert clipped["usage"]["completion_tokens"] == 12
    assert clipped["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_the_engines_values(http: httpx.Client, reference: LLM) -> None:
    ids = list(b"value")
    params = greedy(3, logprobs=2, prompt_logprobs=1)
    wanted = offline(reference, {"prompt_token_ids": ids}, params)
    answer = complete(
        http, prompt=ids, max_tokens=3, logprobs=2, prompt_logprobs=1,
        return_tokens_as_token_ids=True, **GREEDY,
    )  # fmt: skip
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    rows = wanted.outputs[0].logprobs
    token_ids = wanted.outputs[0].token_ids
    assert logprobs["tokens"] == [f"token_id:{token}" for token in token_ids]
    for row, token, logprob, top in zip(
        rows, token_ids, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(row[token].logprob, abs=1e-6)
        wanted_top = {f"token_id:{one}": entry.logprob for one, entry in row.items()}
        assert top == pytest.approx(wanted_top, abs=1e-6)
    prompt_rows = choice["prompt_logprobs"]
    assert prompt_rows[0] is None and len(prompt_rows) == len(ids)
    for row, expected in zip(prompt_rows[1:], wanted.prompt_logprobs[1:], strict=True):
        assert set(row) == {str(token) for token in expected}
        for token, entry in expected.items():
            assert set(row[str(token)]) == {"logprob", "rank", "decoded_token"}
            assert row[str(token)]["rank"] == entry.rank
            assert row[str(token)]["logprob"] == pytest.approx(entry.logprob, abs=1e-6)


def test_echo(http: httpx.Client, reference: LLM) -> None:
    plain = complete(http, prompt="some text", max_tokens=4, **GREEDY)["choices"][0]["text"]
    echoed = complete(http, prompt="some text", max_tokens=4, echo=True, logprobs=1, **GREEDY)
    choice = echoed["choices"][0]
    assert choice["text"] == "some text" + plain
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:9] == list("some text")
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:9] == list(range(9)) and len(logprobs["tokens"]) == 13
    echoed = complete(http, prompt="é€b", max_tokens=1, echo=True, logprobs=0, **GREEDY)
    assert echoed["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3]
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    only = complete(http, prompt=[64, 65], **asked)
    assert only["choices"][0]["text"] == "ab" and only["choices"][0]["token_ids"] == []
    assert only["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert only["usage"]["completion_tokens"] == 1


def test_an_echo_is_the_prompt_as_it_was_given(tiny_llama: Path, tmp_path: Path) -> None:
    """Also where the tokenizer normalises it, so that clients find the answer behind it."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    described = json.loads((folder / "tokenizer.json").read_text())
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "__"}
    described["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, spaces]}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with live_server(folder, tmp_path / "files", layers=None) as server, server.client() as http:
        for given in ("cafe\u0301 e\u0301e\u0301", "a b c", "<|im_start|>e\u0301 b"):
            body = {"prompt": given, "max_tokens": 3, "logprobs": 0, "return_token_ids": True}
            plain = complete(http, **body, **GREEDY)["choices"][0]
            choice = complete(http, **body, echo=True, **GREEDY)["choices"][0]
            assert choice["text"] == given + plain["text"]
            offsets = choice["logprobs"]["text_offset"]
            num_prompt = len(choice["prompt_token_ids"])
            assert max(offsets[:num_prompt]) <= len(given) == offsets[num_prompt]
            moved = [len(given) + place for place in plain["logprobs"]["text_offset"]]
            assert offsets[num_prompt:] == moved


def test_an_echo_is_the_prompt_without_what_the_tokenizer_adds(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    described = json.loads((folder / "tokenizer.json").read_text())
    bos, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text in SPECIAL_TOKENS[:2])
    text = {"Sequence": {"id": "A", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text, end],
        "pair": [],
        "special_tokens": {
            one: {"id": one, "ids": [NUM_BYTES + index], "tokens": [one]}
            for index, one in enumerate(SPECIAL_TOKENS[:2])
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with live_server(folder, tmp_path / "files", layers=None) as server, server.client() as http:
        body = {"max_tokens": 1, "echo": True, "logprobs": 0, "return_token_ids": True} | GREEDY
        texts = ["aé", "<|im_start|>a", "b<|im_start|>"]
        choices = complete(http, prompt=texts, **body)["choices"]
        for given, choice in zip(texts, choices, strict=True):
            assert choice["text"].startswith(given)
            assert choice["prompt_token_ids"][0] == NUM_BYTES
            assert choice["prompt_token_ids"][-1] == NUM_BYTES + 1
            assert choice["logprobs"]["tokens"][0] == SPECIAL_TOKENS[0]
            assert choice["logprobs"]["text_offset"][:2] == [0, 0]
            assert choice["logprobs"]["text_offset"][-2:] == [len(given), len(given)]
        cut = complete(http, prompt="abc", truncate_prompt_tokens=3, **body)["choices"][0]
        assert cut["text"].startswith(
            http.post("/detokenize", json={"tokens": cut["prompt_token_ids"]}).json()["prompt"]
        )


def test_the_operator_sets_defaults_and_the_most_output_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    override = {"temperature": 0.0, "max_new_tokens": 3}
    with (
        live_server(
            tiny_llama, tmp_path, layers=None, override_generation_config=override
        ) as server,
        server.client() as http,
    ):
        free = {"prompt": "abc", "ignore_eos": True, "return_token_ids": True}
        wanted = complete(http, **free | GREEDY)["choices"][0]["token_ids"]
        assert len(wanted) == 3
        for most in ({}, {"max_tokens": 10}, {"max_tokens": 3}):
            choice = complete(http, **free, **most)["choices"][0]
            assert (choice["token_ids"], choice["finish_reason"]) == (wanted, "length")
        assert complete(http, **free, max_tokens=2)["choices"][0]["token_ids"] == wanted[:2]
        rows = complete(http, **free, max_tokens=10, hidden_states={"layers": [1]})
        assert rows["usage"]["completion_tokens"] == 3
        chat = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json=chat).json()
        assert answer["usage"]["completion_tokens"] == 3
        none = complete(http, prompt="abc", max_tokens=0, echo=True)
        assert none["choices"][0]["text"] == "abc"


def test_usage_tells_how_many_tokens_were_found(tiny_llama: Path, tmp_path: Path) -> None:
    settings = ServerSettings(enable_prompt_tokens_details=True)
    prompts = [one["prompt_token_ids"] for one in random_prompts(3, [40, 23])]
    with (
        live_server(tiny_llama, tmp_path, layers=None, settings=settings) as server,
        server.client() as http,
    ):
        for num_cached in (0, 32 + 16):
            usage = complete(http, prompt=prompts, max_tokens=2, **GREEDY)["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": prompts, "max_tokens": 2, "stream": True, "stream_options": options}
        lines = http.post("/v1/completions", json=body).text.split("\n\n")
        usages = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
        found = [(one["prompt_tokens"], one["prompt_tokens_details"]) for one in usages]
        assert found[-1] == (63, {"cached_tokens": 48})
        assert {(length, count["cached_tokens"]) for length, count in found[:-1]} == {
            (40, 32),
            (23, 16),
        }
        rows = complete(http, prompt=prompts[0], max_tokens=0, hidden_states={"layers": [1]})
        assert rows["usage"]["prompt_tokens_details"] is None


def test_stop_strings_and_stop_tokens(http: httpx.Client, reference: LLM) -> None:
    wanted = offline(reference, "abc", greedy(12)).outputs[0]
    stop = wanted.text[3:5]
    answer = complete(http, prompt="abc", max_tokens=12, stop=stop, **GREEDY)["choices"][0]
    assert answer["text"] == wanted.text[: wanted.text.find(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    token = wanted.token_ids[4]
    answer = complete(
        http, prompt="abc", max_tokens=12, stop_token_ids=[token], return_token_ids=True, **GREEDY
    )["choices"][0]
    count = list(wanted.token_ids).index(token) + 1
    assert answer["token_ids"] == list(wanted.token_ids[:count])
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", token)


def test_truncation_keeps_the_side_asked(http: httpx.Client) -> None:
    def kept(**body: Any) -> list[int]:
        choice = complete(http, max_tokens=1, return_token_ids=True, **body)["choices"][0]
        ids: list[int] = choice["prompt_token_ids"]
        return ids

    ids = list(range(100)) * 6
    assert kept(prompt=ids, truncate_prompt_tokens=7) == ids[-7:]
    assert kept(prompt=ids, truncate_prompt_tokens=7, truncation_side="right") == ids[:7]
    assert kept(prompt=ids, truncate_prompt_tokens=-1) == ids[-511:]
    assert kept(prompt=[1, 2], truncate_prompt_tokens=7) == [1, 2]


def test_ids_of_clients_become_the_answers_id(http: httpx.Client) -> None:
    headers = {"x-request-id": "from-header"}
    body = {"prompt": [1], "max_tokens": 1}
    assert complete(http, **body, request_id="mine")["id"] == "cmpl-mine"
    assert http.post("/v1/completions", json=body, headers=headers).json()["id"] == (
        "cmpl-from-header"
    )


def test_the_openai_client(client: openai.OpenAI, reference: LLM) -> None:
    wanted = offline(reference, "openai", greedy(5)).outputs[0]
    answer = client.completions.create(
        model="also-tiny", prompt="openai", max_tokens=5, temperature=0, logprobs=1,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].model_extra["token_ids"] == list(wanted.token_ids)
    assert answer.usage is not None and answer.usage.total_tokens == 11
    assert answer.model == "tiny"
