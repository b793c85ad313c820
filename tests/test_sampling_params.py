"""Settings: defaults, what is refused and how, and the way to another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringVector


def test_defaults_are_upstreams() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p) == (1, 16, 1.0, 1.0)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (0, 0.0, 1.0)
    assert [params.stop, params.stop_token_ids, params.bad_words] == [[], [], []]
    assert params.logprobs is params.seed is params.prompt_logprobs is None
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_numbers_of_arrays_are_numbers() -> None:
    made = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        max_tokens=torch.tensor(7),
        seed=np.int32(-1),
        ignore_eos=np.bool_(True),
    )
    assert made == SamplingParams(temperature=0.5, top_k=3, max_tokens=7, ignore_eos=True)
    assert type(made.temperature) is float
    assert {type(made.top_k), type(made.max_tokens)} == {int}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made
    with pytest.raises(ValueError, match=r"top_k=1\.5: has to be an integer"):
        SamplingParams(top_k=np.float32(1.5))
    with pytest.raises(ValueError, match="temperature=nan"):
        SamplingParams(temperature=np.float32("nan"))
    with pytest.raises(ValueError, match=r"temperature=array.* has to be a finite number"):
        SamplingParams(temperature=np.array([0.5]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 0}, "n=0: has to be at least 1"),
        ({"n": 2, "temperature": 0}, "n=2: has to be 1 when temperature=0"),
        ({"temperature": -1}, "temperature=-1: has to be 0 (greedy) or more"),
        ({"temperature": "hot"}, "temperature='hot': has to be a finite number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 10**400}, "has to be a finite number"),
        ({"top_p": 0}, "top_p=0: has to be in (0, 1]"),
        ({"top_p": 2}, "top_p=2"),
        ({"top_k": -5}, "top_k=-5"),
        ({"top_k": 1.5}, "top_k=1.5: has to be an integer"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0: has to be in [-2, 2]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: has to be greater than 0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": True}, "max_tokens=True: has to be an integer or None"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens=3: has to be at most max_tokens=2"),
        ({"logprobs": -2}, "logprobs=-2"),
        ({"seed": "x"}, "seed='x'"),
        ({"stop": [""]}, "stop=['']"),
        ({"stop": "a", "detokenize": False}, "stop=['a']: has to be empty when detokenize=False"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids=[1, '2']"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=[-1]"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": {1: -1e37}}, "numbers of at most 1e15; -1e+37 is not one"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40: has to be greater than 0 "),
        ({"bad_words": "word"}, "bad_words='word': has to be a list"),
        ({"bad_words": ["w"] * 4097}, "at most 4096 of together 262144 bytes"),
        ({"bad_words": ["ü" * 2**17, "w"]}, "of together 262144 bytes; these have 262145"),
        ({"stop": ["s"] * 257}, "at most 256 of together 65536 bytes"),
        ({"stop": "s" * 65537}, "of together 65536 bytes; these have 65537"),
        (
            {"stop": ["\ud800"]},
            "strings, at most 256 of together 65536 bytes; '\\ud800' is not valid text",
        ),
        ({"stop_token_ids": [0] * 4097}, "at most 4096 token ids"),
        ({"allowed_token_ids": [0] * (2**20 + 1)}, "at most 1048576 token ids"),
        ({"n": 16385, "temperature": 1.0}, "n=16385: has to be at least 1 and at most 16384"),
        ({"ignore_eos": 1}, "ignore_eos=1: has to be True or False"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"output_kind": 9}, "output_kind=9"),
        ({"extra_args": {"kv_transfer_params": "abc"}}, "kv_transfer_params"),
    ],
)
def test_wrong_values_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**settings)
    assert words in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_from_optional() -> None:
    params = SamplingParams.from_optional(
        temperature=None, top_p=0.5, max_tokens=None, logit_bias={"7": 1}, stop="x"
    )
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.5, None)
    assert params.logit_bias == {7: 1.0}
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"a": 1})
    with pytest.raises(ValueError, match=r"logit_bias.* is not a token id"):
        SamplingParams.from_optional(logit_bias={str(i * (2**61 - 1)): 1 for i in range(300_000)})


def test_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], extra_args={"kv_transfer_params": {"x": [1]}})
    clone = params.clone()
    assert clone == params
    clone.stop_strings.append("b")
    assert clone.extra_args is not None
    clone.extra_args["kv_transfer_params"]["x"].append(2)
    clone.all_stop_token_ids.add(5)
    assert params.stop == ["a"]
    assert params.extra_args == {"kv_transfer_params": {"x": [1]}}
    assert params.all_stop_token_ids == set()


def test_stop_ids_for_the_minimum_length() -> None:
    params = SamplingParams(stop_token_ids=[4])
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 3)
    assert params.all_stop_token_ids == {1, 2, 3, 4}
    assert params.stop_token_ids == [4]


def test_crosses_processes() -> None:
    params = SamplingParams(
        stop="x", logit_bias={3: -1.5}, output_kind=RequestOutputKind.DELTA, extra_args={"a": [1]}
    )
    params.update_from_generation_config({}, [9])
    params.set_bad_words_token_ids([[1, 2]])
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_errors_show_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ValueError, match="bad_words=") as caught:
        SamplingParams(bad_words=["x" * 10**6] * 4096)
    assert len(str(caught.value)) < 4000


def test_a_checked_copy_is_independent_and_checked() -> None:
    params = SamplingParams(stop=["s"], extra_args={"a": [1]})
    copied = params.checked_copy()
    assert copied == params
    params.temperature, params.stop[0] = float("nan"), "t"  # type: ignore[index]
    params.extra_args["a"].append(object())  # type: ignore[index]
    assert copied == SamplingParams(stop=["s"], extra_args={"a": [1]})
    with pytest.raises(ValueError, match="temperature=nan"):
        params.checked_copy()
    params.temperature = 1.0
    with pytest.raises(ValueError, match="type object are not supported; extra_args have to"):
        params.checked_copy()


def test_steering_may_be_set_in_each_of_its_types() -> None:
    vector = SteeringVector(torch.ones(4), layers=2, scale=0.5)
    specs = vector.specs()
    for given in (vector, [vector], (vector,), specs, specs[0]):
        assert SamplingParams(steering=given).steering == specs
        later = SamplingParams()
        later.steering = given
        assert later.steering_specs == later.checked_copy().steering == specs
    assert SamplingParams(steering=[]).steering is None
    assert SamplingParams().steering_specs == []


def test_steering_crosses_processes_in_one_form() -> None:
    params = SamplingParams(steering=SteeringVector(torch.ones(4), layers=2))
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams).steering == params.steering


@pytest.mark.exhaustive
def test_type_checkers_take_what_the_constructor_takes(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "user.py"
    program.write_text(
        """
from vllm import LLM, SamplingParams, SteeringType, SteeringVector


def run(llm: LLM, vector: SteeringVector, several: SteeringType) -> None:
    params = SamplingParams(steering=vector)
    params.steering = [vector, vector]
    SamplingParams(steering=several)
    for given in (vector, [vector], several):
        list(llm.extract(["x"], [1], steering=given))
    SamplingParams(steering=3)
"""
    )
    printed, _, status = api.run(["--strict", "--cache-dir", str(tmp_path / "cache"), str(program)])
    assert status == 1
    (error,) = [line for line in printed.splitlines() if "error:" in line]
    assert f'{program.name}:11: error: Argument "steering"' in error
