"""What answers of completions and of chat completions have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from fastapi import Request

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.logprobs import TokenName, name_by_id, name_by_text
from vllm.entrypoints.openai.protocol import GenerationBody, StreamOptions
from vllm.entrypoints.openai.responses import Usage
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.transformers_utils.tokenizer import make_decoder

MAX_CHOICES = 16384
"""Continuations that one HTTP request may ask for in all."""


def make_request_id(prefix: str, request: Request, body: GenerationBody) -> str:
    """``<prefix>-<id>``: the client's id (header, then field), or 16 random hex digits."""
    asked = request.headers.get("x-request-id") or body.request_id
    return f"{prefix}-{asked or uuid.uuid4().hex[:16]}"


def check_num_choices(n: int | None, num_prompts: int) -> None:
    """ApiError: one HTTP request asks for too much."""
    if (n or 1) * num_prompts > MAX_CHOICES:
        raise bad_request(f"{num_prompts} prompts with n={n} are more than {MAX_CHOICES} choices")


def token_namer(state: ServerState, body: GenerationBody) -> TokenName:
    """How tokens read in log-probabilities."""
    if body.return_tokens_as_token_ids:
        return name_by_id
    return name_by_text(lambda ids: make_decoder(state.client.get_tokenizer())(ids))


def make_usage(num_prompt_tokens: int, num_completion_tokens: int) -> Usage:
    """Counts of tokens."""
    total = num_prompt_tokens + num_completion_tokens
    return Usage(num_prompt_tokens, total, num_completion_tokens)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Counts over all prompts and their continuations; a prompt counts once."""
    num_prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_completion_tokens = sum(len(one.token_ids) for out in outputs for one in out.outputs)
    return make_usage(num_prompt_tokens, num_completion_tokens)


class StreamUsage:
    """Counts of tokens of one stream, as it goes on."""

    def __init__(self, options: StreamOptions | None, prompt_lengths: Sequence[int]) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        """Whether a last chunk carries the counts."""
        self.in_every_chunk = self.at_end and bool(options and options.continuous_usage_stats)
        self._prompt_lengths = prompt_lengths
        self._num_tokens: dict[int, int] = {}

    def add(self, choice_index: int, num_new_tokens: int) -> None:
        """New tokens of a choice."""
        self._num_tokens[choice_index] = self._num_tokens.get(choice_index, 0) + num_new_tokens

    def of_choice(self, choice_index: int, prompt_index: int) -> Usage:
        """Counts of one choice until now."""
        return make_usage(self._prompt_lengths[prompt_index], self._num_tokens.get(choice_index, 0))

    def total(self) -> Usage:
        """Counts of all choices."""
        return make_usage(sum(self._prompt_lengths), sum(self._num_tokens.values()))


class Answering(NamedTuple):
    """One HTTP request that is being answered: what every body or chunk of it says."""

    state: ServerState
    request: Request
    created: int
    """Unix time, in seconds."""
    model: str
    system_fingerprint: str

    @classmethod
    def begin(cls, state: ServerState, request: Request) -> Self:
        """ApiError (507): the files of this server fill their quota."""
        if state.store is not None and state.extracts:
            state.store.check_quota()
        return cls(state, request, int(time.time()), state.model_name, state.system_fingerprint)

    def transfer_params(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """What the connector says of a continuation, with the file's URL where it has one."""
        params = completion.kv_transfer_params
        store = self.state.store
        if params is None or store is None:
            return params
        path = params.get("hidden_states_path")
        url = store.url_for(self.request, path) if isinstance(path, str) else None
        return params if url is None else {**params, "hidden_states_url": url}


__all__ = [
    "Answering",
    "StreamUsage",
    "check_num_choices",
    "make_request_id",
    "make_usage",
    "token_namer",
    "usage_of",
]
