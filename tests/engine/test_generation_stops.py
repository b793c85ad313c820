"""When generation ends: end-of-sequence ids, stop ids and strings, least and most tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(31, [12, 60, 5])
PROMPT = PROMPTS[1]
BYTES_ONLY: dict[str, Any] = {"allowed_token_ids": list(range(256))}


def run(llm: LLM, params: SamplingParams, prompts: Any = PROMPT) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def unstopped(folder: Path, num_tokens: int = 24) -> list[int]:
    """Generate ``num_tokens`` tokens with nothing that ends them earlier."""
    with engine(folder) as llm:
        (output,) = run(llm, greedy(num_tokens, **BYTES_ONLY))
    return list(output.outputs[0].token_ids)


def first_seen_late(tokens: list[int]) -> int:
    """An index whose token does not occur before it, far from the start and from the end."""
    return max(i for i, token in enumerate(tokens[:-8]) if token not in tokens[:i])


def greedy_until(max_tokens: int, **params: Any) -> SamplingParams:
    """Greedy settings that heed the end-of-sequence ids."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **BYTES_ONLY, **params)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_end_of_sequence_ids_of_the_generation_config(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(family), folder)
    tokens = unstopped(folder)
    index = first_seen_late(tokens)
    assert index >= 3
    settings = {"eos_token_id": [258, tokens[index]], "max_new_tokens": 20, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with engine(folder) as llm:
        (output,) = run(llm, greedy_until(24))
        assert list(output.outputs[0].token_ids) == tokens[: index + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason is None
        # The end is a token of the reply, but no part of its text.
        tokenizer: Any = llm.get_tokenizer()
        assert output.outputs[0].text == tokenizer.decode(tokens[:index])
        (ignored,) = run(llm, greedy(24, **BYTES_ONLY))
        assert list(ignored.outputs[0].token_ids) == tokens
        (held_back,) = run(llm, greedy_until(24, min_tokens=index + 2))
        # Up to min_tokens the end is not even a candidate.
        assert list(held_back.outputs[0].token_ids)[:index] == tokens[:index]
        assert tokens[index] not in list(held_back.outputs[0].token_ids)[: index + 2]
        assert len(held_back.outputs[0].token_ids) >= index + 2
        defaults = llm.get_default_sampling_params()
        assert (defaults.max_tokens, defaults.temperature) == (20, 0.5)
        (by_default,) = llm.generate([PROMPT], use_tqdm=False)
        assert len(by_default.outputs[0].token_ids) <= 20


def test_stop_token_ids(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    tokens = unstopped(folder)
    index = first_seen_late(tokens)
    with engine(folder) as llm:
        (output,) = run(llm, greedy(24, stop_token_ids=[tokens[index], 299], **BYTES_ONLY))
    assert list(output.outputs[0].token_ids) == tokens[: index + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == tokens[index]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("output_tokens", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_stop_string_keeps_the_file(
    family: str, output_tokens: bool, include: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    with engine(folder, **extraction_config([1, 4], tmp_path)) as llm:
        (free,) = run(llm, greedy(24, **BYTES_ONLY))
        text = free.outputs[0].text
        # Two characters that are seen there for the first time.
        start = max(i for i in range(len(text) - 8) if text.find(text[i : i + 2]) == i)
        stop = text[start : start + 2]
        transfer = {"include_output_tokens": output_tokens}
        params = greedy(
            24,
            stop=["not there", stop],
            include_stop_str_in_output=include,
            extra_args={"kv_transfer_params": transfer},
            **BYTES_ONLY,
        )
        outputs = run(llm, params, [PROMPT, PROMPTS[0], PROMPT])
        for output in (outputs[0], outputs[2]):
            choice = output.outputs[0]
            assert choice.finish_reason == "stop"
            assert choice.stop_reason == stop
            assert choice.text == text[: start + 2 if include else start]
            tokens = list(choice.token_ids)
            assert tokens == list(free.outputs[0].token_ids)[: len(tokens)]
            num_rows = len(rows_of(output))
            assert num_rows == 60 + (len(tokens) - 1 if output_tokens else 0)
        assert not core_of(llm).scheduler.requests


def test_min_tokens_holds_stop_strings_back(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama")) as llm:
        (free,) = run(llm, greedy(12, **BYTES_ONLY))
        text = free.outputs[0].text
        (output,) = run(llm, greedy(12, min_tokens=12, stop=[text[:1]], **BYTES_ONLY))
        assert len(output.outputs[0].token_ids) == 12
        (output,) = run(llm, greedy(12, stop=[text[:1]], **BYTES_ONLY))
        assert output.outputs[0].text == ""


def test_the_context_ends_generation(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen2"), max_model_len=64) as llm:
        for max_tokens in (None, 1000):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            (output,) = run(llm, params)
            assert len(output.outputs[0].token_ids) == 4
            assert output.outputs[0].finish_reason == "length"
