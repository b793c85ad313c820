"""Settings of a request over HTTP -> SamplingParams, with what only the server refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import GenerationBody
from vllm.entrypoints.openai.state import ServerState
from vllm.sampling_params import RequestOutputKind, SamplingParams

MAX_TEMPERATURE = 2.0

_SETTINGS = (GenerationBody.model_fields.keys() & set(SamplingParams.__struct_fields__)) - {
    *("max_tokens", "prompt_logprobs", "top_k", "truncate_prompt_tokens")
}
"""Fields that a request and SamplingParams both have, but for those that need a closer look."""


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
    values = body.__dict__
    settings: dict[str, Any] = dict(state.default_sampling)
    settings |= {name: values[name] for name in _SETTINGS if values[name] is not None}
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
    form = (body.response_format or {}).get("type", "text")
    unsupported = "min_p" if body.min_p else "logit_bias" if body.logit_bias else None
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        message = f"temperature={body.temperature}: has to be in [0, {MAX_TEMPERATURE:g}]"
        raise bad_request(message, "temperature")
    if state.extracts and unsupported is not None:
        raise bad_request(f"{unsupported} is not supported by a server that extracts hidden states")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs: not with stream=true", "prompt_logprobs")
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

    ApiError: no room is left.
    """
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
    if asked is not None and asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}", "max_tokens")
    if asked is not None and asked > max_model_len:
        raise bad_request(
            f"max_tokens={asked} is more than this model's context holds ({max_model_len} tokens)",
            "max_tokens",
        )
