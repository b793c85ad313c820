"""Prompts in every form, and what is wrong with the ones that are refused."""

from __future__ import annotations

import re
from array import array
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers

from tests.engine.frontend_harness import byte_fallback_tokenizer, byte_level_tokenizer, make_config
from vllm.inputs import as_prompt_list
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer(model_max_length=8)


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> InputProcessor:
    return InputProcessor(make_config(), tokenizer)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        (["a", [1], {"prompt": "x"}, {"prompt_token_ids": [4]}], 4),
        ({"prompt_token_ids": [1]}, 1),
        (np.array([1, 2]), 1),
        ([torch.tensor([1, 2]), "b"], 2),
        (list(np.array([1, 2])), 1),
        (list(torch.tensor([1, 2])), 1),
        ([[np.int64(1), 2], [3]], 2),
        (np.array(["a", "b"]), 2),
        (list(np.array(["a", "b"])), 2),
        (np.array(["a", "b"], dtype=object), 2),
        (np.array([[1, 2], [3]], dtype=object), 2),
        (array("i", [1, 2]), 1),
        (UserList(["a", "b"]), 2),
        ([], 0),
    ],
)
def test_one_prompt_or_several(prompts: Any, count: int) -> None:
    assert len(as_prompt_list(prompts)) == count


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, torch.tensor, lambda ids: list(np.array(ids))]
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_token_ids_become_plain_ints(processor: InputProcessor, make: Any, as_dict: bool) -> None:
    ids = make([5, 6, 7])
    request = processor.process(
        "0", {"prompt_token_ids": ids} if as_dict else ids, SamplingParams()
    )
    assert request.request.prompt_token_ids == [5, 6, 7]
    assert {type(token) for token in request.request.prompt_token_ids} == {int}


def test_text_is_tokenised_and_ids_win(processor: InputProcessor, tokenizer: Any) -> None:
    text = processor.process("9", "hello wörld", SamplingParams())
    assert text.request.prompt_token_ids == tokenizer.encode("hello wörld")
    assert text.prompt == "hello wörld"
    assert re.fullmatch(r"9-[0-9a-f]{8}", text.request.request_id)
    both = processor.process(
        "9", {"prompt": "t", "prompt_token_ids": [3], "cache_salt": "s"}, SamplingParams()
    )
    assert (both.prompt, both.request.prompt_token_ids, both.request.cache_salt) == ("t", [3], "s")
    assert both.request.request_id != text.request.request_id


def test_no_salt_is_that_of_a_steered_request(processor: InputProcessor) -> None:
    with pytest.raises(ValueError, match="cache_salt: has a NUL character"):
        processor.process(
            "9", {"prompt_token_ids": [3], "cache_salt": "\0steering:1"}, SamplingParams()
        )


def test_room_and_end_tokens_are_settled(processor: InputProcessor, tokenizer: Any) -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[8])
    request = processor.process("0", [1] * 60, params).request
    assert request.sampling_params.max_tokens == 4
    assert request.eos_token_ids == (310, tokenizer.eos_token_id)
    assert request.sampling_params.all_stop_token_ids == {8, 310, tokenizer.eos_token_id}
    assert params.max_tokens is None
    assert params.all_stop_token_ids == {8}
    clipped = processor.process("0", [1] * 60, SamplingParams(max_tokens=50)).request
    assert clipped.sampling_params.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ([1, 320], {}, "Token id 320 is out of vocabulary: the model's ids are 0 to 319"),
        ([1, -5], {}, "Token id -5 is out of vocabulary"),
        ([1, "a"], {}, "token id 'a' at position 1"),
        ([1, 1.5], {}, "token id 1.5 at position 1"),
        ([1, True], {}, "token id True at position 1"),
        (5, {}, "token ids of type int"),
        ({}, {}, 'needs "prompt", "prompt_token_ids" or "prompt_embeds"'),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, "'multi_modal_data'"),
        ({"prompt": 3}, {}, "'prompt' of a prompt is 3"),
        (
            [1] * 65,
            {},
            "the prompt is 65 tokens long, more than the context holds (max_model_len=64)",
        ),
        ([1] * 64, {}, "no room for one output token"),
        ([1], {"max_tokens": 0}, "max_tokens=0: has to be at least 1, unless"),
        ([1], {"logprobs": 21}, "logprobs=21: has to be at most 20"),
        ([1], {"prompt_logprobs": -1}, "prompt_logprobs=-1: has to be at most 20"),
        ([1], {"stop_token_ids": [320]}, "stop_token_ids: token id 320"),
        ([1], {"allowed_token_ids": [1, 999]}, "allowed_token_ids: token id 999"),
        ([1], {"logit_bias": {400: 1.0}}, "logit_bias: token id 400"),
        ([1], {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens=65: has to be at most"),
        (
            [1],
            {"allowed_token_ids": [310], "min_tokens": 1},
            "allowed_token_ids=[310]: all of them are excluded",
        ),
    ],
)
def test_bad_input_is_named(
    processor: InputProcessor, prompt: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        processor.process("0", prompt, SamplingParams(**settings))
    assert words in str(caught.value)


def test_extraction_needs_no_output_token() -> None:
    processor = InputProcessor(make_config(extracts=True), None, "none here")
    request = processor.process("0", [1] * 64, SamplingParams(max_tokens=0)).request
    assert request.sampling_params.max_tokens == 0
    assert len(request.prompt_token_ids) == 64


def test_without_a_tokenizer_ids_work_and_text_says_why() -> None:
    processor = InputProcessor(make_config(), None, "skip_tokenizer_init=True")
    assert processor.process("0", [1, 2], SamplingParams()).request.prompt_token_ids == [1, 2]
    for prompt, params in (
        ("text", SamplingParams()),
        ([1], SamplingParams(stop="x")),
        ([1], SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(ValueError, match=r"skip_tokenizer_init=True"):
            processor.process("0", prompt, params)


def test_truncation_keeps_the_end(processor: InputProcessor) -> None:
    prompt = list(range(100))

    def kept(keep: int, **settings: Any) -> list[int]:
        params = SamplingParams(truncate_prompt_tokens=keep, **settings)
        return processor.process("0", prompt, params).request.prompt_token_ids

    assert kept(3) == [97, 98, 99]
    assert kept(-1, max_tokens=10) == prompt[-54:]
    assert kept(-1, max_tokens=None) == prompt[-63:]


def test_bad_words_at_the_start_and_after_a_space(
    processor: InputProcessor, tokenizer: Any
) -> None:
    params = SamplingParams(bad_words=["there", "zq"])
    request = processor.process("0", [1], params).request
    expected = [tokenizer.encode(text) for text in ("there", " there", "zq", " zq")]
    assert request.sampling_params.bad_words_token_ids == expected
    assert len(expected[1]) == 1
    assert len(expected[2]) == 2


def test_bad_words_behind_other_text() -> None:
    """Words behind a bracket are spelt otherwise than words at the start of a text."""
    tokenizer = byte_fallback_tokenizer()
    core = tokenizer.backend_tokenizer
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    processor = InputProcessor(make_config(), tokenizer, "")
    request = processor.process("0", [1], SamplingParams(bad_words=["b"])).request
    spelt = [tokenizer.convert_ids_to_tokens(ids) for ids in
             request.sampling_params.bad_words_token_ids]  # fmt: skip
    assert spelt == [["▁", "b"], ["▁", "▁", "b"], ["b"]]
