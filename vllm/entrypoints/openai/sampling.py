"""Settings of a request over HTTP -> SamplingParams, with what only the server refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import GenerationBody
from vllm.entrypoints.openai.state import ServerState
from vllm.sampling_params import RequestOutputKind, SamplingParams

MAX_TEMPERATURE = 2.0

_SETTINGS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that a request and SamplingParams both have."""


def make_sampling_params(
    state: ServerState,
    body: GenerationBody,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The settings of ``body``; the defaults are the checkpoint's, then SamplingParams' own.

    Raises:
        ValueError, ApiError: a setting cannot be served.
    """
    settings: dict[str, Any] = dict(state.default_sampling)
    values = body.__dict__
    for name in _SETTINGS:
        if values[name] is not None:
            settings[name] = values[name]
    if body.top_k is not None:
        settings["top_k"] = min(body.top_k, state.vocab_size)
    _check_settings(state, body)
    return SamplingParams.from_optional(
        **settings,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        extra_args=_extra_args(body.kv_transfer_params),
    )


def _check_settings(state: ServerState, body: GenerationBody) -> None:
    temperature = body.temperature
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise bad_request(
            f"temperature={temperature}: has to be in [0, {MAX_TEMPERATURE:g}]", "temperature"
        )
    if state.extracts and (body.min_p or body.logit_bias):
        name = "min_p" if body.min_p else "logit_bias"
        raise bad_request(f"{name} is not supported by a server that extracts hidden states")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs: not with stream=true", "prompt_logprobs")
    form = (body.response_format or {}).get("type", "text")
    if form != "text":
        raise bad_request(f"response_format: the type {form!r} is not supported, only 'text'")


def _extra_args(kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
    if kv_transfer_params is None:
        return None
    try:
        msgspec.msgpack.encode(kv_transfer_params)
    except (OverflowError, RecursionError) as error:
        raise bad_request(f"kv_transfer_params: {error}") from None
    return {"kv_transfer_params": kv_transfer_params}


def resolve_max_tokens(
    asked: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int
) -> int:
    """How many tokens may come: what was asked, as far as there is room; None: all there is.

    Raises:
        ApiError: less than one was asked, more than any request can have, or no room is left.
    """
    check_asked_max_tokens(asked, max_model_len)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise bad_request(
            f"max_tokens must be at least 1, got {room}: the prompt fills the context "
            f"({max_model_len} tokens)",
            "max_tokens",
        )
    wanted = default if asked is None else asked
    return room if wanted is None else min(wanted, room)


def check_asked_max_tokens(asked: int | None, max_model_len: int) -> None:
    """ApiError: no request can have so many tokens, or so few."""
    if asked is None:
        return
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}", "max_tokens")
    if asked > max_model_len:
        raise bad_request(
            f"max_tokens={asked} is more than this model's context holds ({max_model_len} tokens)",
            "max_tokens",
        )


__all__ = ["check_asked_max_tokens", "make_sampling_params", "resolve_max_tokens"]
