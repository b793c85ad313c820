"""Messages between the front end (text) and the engine core (tokens)."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, kw_only=True):
    """A checked request: token ids and settings, no text."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the output unless ``ignore_eos`` (tokenizer and generation config)."""
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None


class EngineCoreOutput(msgspec.Struct, kw_only=True):
    """What one step gave one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: LogprobsLists | None = None
    """One row for each new token."""
    new_prompt_logprobs: LogprobsLists | None = None
    """Rows for prompt positions 1 .. n-1 that this step computed, in order."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string; the message when ``finish_reason`` is ERROR."""
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, kw_only=True):
    """Everything one step gave."""

    outputs: list[EngineCoreOutput] = []
