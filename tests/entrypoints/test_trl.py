"""The endpoints that TRL's clients use, against transformers and the offline engine."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.models.oracle import reference_run
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import ServerSettings

SEQUENCES = [prompt["prompt_token_ids"] for prompt in random_prompts(17, [9, 40, 2, 1, 23], 250)]
LENGTHS = [4, 0, 1, 1, 23]
K, TEMPERATURE = 5, 1.6
SCORES = "/get_sequence_logprobs/"


@pytest.fixture(scope="module")
def teacher(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = ServerSettings(max_inline_hidden_states_mib=0.2, max_hidden_states_mib=1.0)
    options = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
    folder = tmp_path_factory.mktemp("teacher")
    with live_server(tiny_llama, folder, layers=None, settings=settings, **options) as running:
        yield running


@pytest.fixture(scope="module")
def logprobs(tiny_llama: Path) -> list[torch.Tensor]:
    """[tokens, vocabulary] of each sequence, transformers' in float32."""
    rows = [reference_run(tiny_llama, ids).logits.float() for ids in SEQUENCES]
    return [(one / TEMPERATURE).log_softmax(-1) for one in rows]


def post(server: LiveServer, path: str, **body: Any) -> Any:
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(server: LiveServer, form: str, **more: Any) -> Any:
    body = {
        "sequences": SEQUENCES,
        "prompt_lengths": LENGTHS,
        "top_logprobs": K,
        "temperature": TEMPERATURE,
        "response_format": form,
    }
    return post(server, SCORES, **body | more)


def top(row: torch.Tensor, k: int) -> tuple[list[int], list[float]]:
    """Ids and values, falling; of equal values the lower id first."""
    ids = row.sort(descending=True, stable=True).indices[:k]
    return ids.tolist(), row[ids].tolist()


def test_lists(teacher: LiveServer, logprobs: list[torch.Tensor]) -> None:
    answer = scores(teacher, "json")
    assert answer.keys() == {"logprobs", "logprob_token_ids"}
    for index, (ids, length) in enumerate(zip(SEQUENCES, LENGTHS, strict=True)):
        found = answer["logprobs"][index], answer["logprob_token_ids"][index]
        assert len(found[0]) == len(found[1]) == len(ids) - length
        for place, position in enumerate(range(length, len(ids))):
            values, token_ids = found[0][place], found[1][place]
            if position == 0:
                assert values == token_ids == []
                continue
            row, actual = logprobs[index][position - 1], ids[position]
            right_ids, right = top(row, K)
            is_other = actual not in right_ids
            assert token_ids == right_ids + [actual] * is_other
            expected = right + [float(row[actual])] * is_other
            assert values == pytest.approx(expected, abs=1e-4)


def decode(answer: dict[str, Any]) -> tuple[np.ndarray, ...]:
    batch, longest, k = answer["shape"]
    widths = {"logprobs": k, "token_ids": k, "actual_logprobs": 1, "actual_token_ids": 1}
    return tuple(
        np.frombuffer(
            base64.b64decode(answer[f"{name}_b64"]), "<f4" if "logprobs" in name else "<i4"
        ).reshape(batch, longest, width)
        for name, width in widths.items()
    )


def test_arrays(teacher: LiveServer, logprobs: list[torch.Tensor]) -> None:
    answer = scores(teacher, "binary")
    lengths = [len(ids) - length for ids, length in zip(SEQUENCES, LENGTHS, strict=True)]
    assert answer["completion_lengths"] == lengths
    assert answer["shape"] == [len(SEQUENCES), max(lengths), K]
    values, token_ids, actual, actual_ids = decode(answer)
    for index, (ids, length) in enumerate(zip(SEQUENCES, LENGTHS, strict=True)):
        for place in range(max(lengths)):
            position = length + place
            if position == 0 or position >= len(ids):
                assert (values[index, place] == -math.inf).all()
                assert not token_ids[index, place].any()
                assert actual[index, place] == -math.inf
                continue
            row = logprobs[index][position - 1]
            right_ids, right = top(row, K)
            assert token_ids[index, place].tolist() == right_ids
            assert values[index, place].tolist() == pytest.approx(right, abs=1e-4)
            assert actual_ids[index, place] == ids[position]
            assert float(actual[index, place, 0]) == pytest.approx(
                float(row[ids[position]]), abs=1e-4
            )


def test_both_forms_and_any_batch_have_the_same_bits(teacher: LiveServer) -> None:
    together, lists = decode(scores(teacher, "binary")), scores(teacher, "json")
    with ThreadPoolExecutor(4) as threads:
        alone = list(
            threads.map(
                lambda pair: decode(
                    scores(teacher, "binary", sequences=[pair[0]], prompt_lengths=[pair[1]])
                ),
                zip(SEQUENCES, LENGTHS, strict=True),
            )
        )
    for index, one in enumerate(alone):
        for found, expected in zip(one, together, strict=True):
            assert (found[0] == expected[index, : found.shape[1]]).all()
        for place, row in enumerate(lists["logprobs"][index]):
            assert row[:K] == together[0][index, place, : len(row[:K])].tolist()


def test_more_than_the_vocabulary_and_nothing(teacher: LiveServer) -> None:
    answer = scores(teacher, "binary", top_logprobs=400, sequences=[[5, 6]], prompt_lengths=[1])
    values, token_ids, *_ = decode(answer)
    assert answer["shape"] == [1, 1, 400]
    assert sorted(token_ids[0, 0, :307].tolist()) == list(range(307))
    assert (values[0, 0, 307:] == -math.inf).all()
    empty = scores(teacher, "binary", sequences=[], prompt_lengths=[])
    assert (empty["shape"], empty["completion_lengths"]) == ([0, 0, K], [])
    nothing = scores(teacher, "json", sequences=[[], [4]], prompt_lengths=[0, 1])
    assert nothing == {"logprobs": [[], []], "logprob_token_ids": [[], []]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sequences": [[5, 999]], "prompt_lengths": [1]}, "out of vocabulary"),
        ({"sequences": [[5] * 600], "prompt_lengths": [1]}, "maximum context length is 512"),
        ({"sequences": [[5, 6]], "prompt_lengths": [3]}, "prompt_lengths.0=3: has to be in [0, 2]"),
        ({"sequences": [[5, 6]], "prompt_lengths": [-1]}, "prompt_lengths.0=-1"),
        ({"sequences": [[5, 6]], "prompt_lengths": []}, "prompt_lengths: has 0 numbers for 1"),
        ({"sequences": [[5, "a"]], "prompt_lengths": [1]}, "body.sequences.0.1"),
        ({"sequences": "abc", "prompt_lengths": [1]}, "body.sequences"),
        ({"sequences": [[5, 6]], "prompt_lengths": [True]}, "body.prompt_lengths.0"),
        ({"sequences": [[5, 6]]}, "body.prompt_lengths: Field required"),
        ({"top_logprobs": 0}, "body.top_logprobs"),
        ({"top_logprobs": 1025}, "body.top_logprobs"),
        ({"temperature": 0}, "body.temperature"),
        ({"temperature": "warm"}, "body.temperature"),
        ({"response_format": "xml"}, "body.response_format"),
        ({"sequences": [[5] * 400] * 5, "prompt_lengths": [0] * 5, "top_logprobs": 300}, "--max-"),
        (
            {
                "sequences": [[5] * 400] + [[5, 6]] * 500,
                "prompt_lengths": [0] * 501,
                "response_format": "binary",
            },
            "arrays of 501 times 400 tokens take more than",
        ),
    ],
)
def test_bad_bodies_are_named(body: dict[str, Any], message: str, teacher: LiveServer) -> None:
    good = {"sequences": [[5, 6, 7]], "prompt_lengths": [1]}
    with teacher.client() as http:
        sent = body if "sequences" in body else good | body
        answer = http.post(SCORES, json=sent)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_generate(teacher: LiveServer, tiny_llama: Path) -> None:
    prompts = SEQUENCES[:2]
    body = {"n": 2, "temperature": 1.2, "max_tokens": 4, "logprobs": 3, "top_k": 40}
    answer = post(
        teacher, "/generate/", prompts=prompts, images=None, **body, generation_kwargs={"seed": 5}
    )
    assert answer["prompt_ids"] == prompts
    options = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
    with LLM(str(tiny_llama), max_model_len=512, kv_cache_memory_bytes=2**24, **options) as llm:
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, SamplingParams(**body, seed=5), use_tqdm=False)  # type: ignore[arg-type]
    completions = [one for output in outputs for one in output.outputs]
    assert answer["completion_ids"] == [list(one.token_ids) for one in completions]
    for index, one in enumerate(completions):
        for place, row in enumerate(one.logprobs or []):
            ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
            assert answer["logprob_token_ids"][index][place] == [token for token, _ in ranked]
            assert answer["logprobs"][index][place] == [entry.logprob for _, entry in ranked]
    texts = post(teacher, "/generate/", prompts=["ab", "c"], max_tokens=1, logprobs=None)
    assert (texts["logprobs"], texts["logprob_token_ids"]) == (None, None)
    assert [len(ids) for ids in texts["completion_ids"]] == [1, 1]
    assert post(teacher, "/generate/", prompts=[])["prompt_ids"] == []


def test_chat(teacher: LiveServer) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Why?", "So")]
    answer = post(teacher, "/chat/", messages=chats, max_tokens=3, temperature=0, n=1)
    for chat, prompt, completion in zip(
        chats, answer["prompt_ids"], answer["completion_ids"], strict=True
    ):
        alone = {"messages": chat, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
        one = post(teacher, "/v1/chat/completions", **alone)
        assert prompt == one["prompt_token_ids"]
        assert completion == one["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate/", {"prompts": "one text"}, "body.prompts"),
        ("/generate/", {"prompts": [5, 6]}, "body.prompts"),
        ("/generate/", {"prompts": ["a"], "images": [["x"]]}, "images"),
        ("/generate/", {"prompts": ["a"], "n": "x"}, "body.n"),
        ("/generate/", {"prompts": ["a"], "temperature": 9}, "temperature=9"),
        ("/generate/", {"prompts": ["a"], "structured_outputs_regex": "a"}, "structured_outputs"),
        ("/generate/", {"prompts": ["a"], "generation_kwargs": {"x": 1}}, "generation_kwargs.x"),
        ("/generate/", {"prompts": ["a"], "generation_kwargs": {"stream": True}}, "kwargs.stream"),
        ("/generate/", {"prompts": ["a"], "generation_kwargs": {"seed": "x"}}, "body.seed"),
        ("/generate/", {"prompts": ["a", ""]}, "prompt 1 of the list is empty"),
        ("/chat/", {"messages": [[]]}, ""),
        ("/chat/", {"messages": [{"role": "user"}]}, "body.messages"),
        ("/chat/", {"messages": [[{"role": "user", "content": 5}]]}, "body.messages.0.0.content"),
        ("/chat/", {"messages": [[{"role": "user", "content": "a"}]], "n": 0}, "n=0"),
        ("/chat/", {"messages": [[{"role": "user", "content": "a"}]], "tools": 5}, "body.tools"),
    ],
)
def test_bad_generations_are_named(
    path: str, body: dict[str, Any], message: str, teacher: LiveServer
) -> None:
    with teacher.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_an_extracting_server_leaves_no_files(server: LiveServer, storage: Path) -> None:
    before = set(storage.iterdir())
    answer = post(server, "/generate/", prompts=[[5, 6, 7]], max_tokens=2)
    assert len(answer["completion_ids"][0]) == 2
    assert set(storage.iterdir()) == before


def test_the_small_endpoints(teacher: LiveServer) -> None:
    with teacher.client() as http:
        assert http.get("/health/").json() == {"status": "ok"}
        for path in ("/get_world_size", "/get_world_size/"):
            assert http.get(path).json() == {"world_size": 1}
        post(teacher, "/generate/", prompts=[SEQUENCES[1] * 3], max_tokens=1)
        for path in ("/reset_prefix_cache", "/reset_prefix_cache/"):
            assert http.post(path).json()["success"] is True


def test_temperature_reaches_prompt_logprobs(
    teacher: LiveServer, logprobs: list[torch.Tensor]
) -> None:
    """TRL from 1.12 on reads the teacher from /v1/completions of a server in this mode."""
    body = {"max_tokens": 1, "temperature": TEMPERATURE, "prompt_logprobs": K}
    answer = post(teacher, "/v1/completions", prompt=SEQUENCES[:2], **body)
    for ids, rows, choice in zip(SEQUENCES, logprobs, answer["choices"], strict=False):
        for position, entries in enumerate(choice["prompt_logprobs"][1:], 1):
            right_ids, right = top(rows[position - 1], K)
            ranked = sorted(entries.items(), key=lambda item: item[1]["rank"])[:K]
            assert [int(token) for token, _ in ranked] == right_ids
            assert [entry["logprob"] for _, entry in ranked] == pytest.approx(right, abs=1e-4)
            actual = entries[str(ids[position])]["logprob"]
            assert actual == pytest.approx(float(rows[position - 1][ids[position]]), abs=1e-4)
