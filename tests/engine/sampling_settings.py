"""Every way to choose tokens, for tests in which all of them stand in one batch."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

ALL_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.02},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": -1},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": -1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": {4: 3.5, 7: -2.0}},
    {"temperature": 0.0, "allowed_token_ids": [4, 9, 199]},
    {"temperature": 0.0, "bad_words": ["a b"]},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(0, 300, 3))},
    {"temperature": 1.0, "repetition_penalty": 1.1, "logprobs": 2, "prompt_logprobs": 1,
     "logit_bias": {3: 1.0}, "top_p": 0.95, "min_p": 0.01, "min_tokens": 2},
]  # fmt: skip


def all_params(max_tokens: int) -> list[SamplingParams]:
    """One for each of the settings, each with a seed of its own."""
    return [
        SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **settings)
        for seed, settings in enumerate(ALL_SETTINGS)
    ]
