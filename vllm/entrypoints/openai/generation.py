"""What completions and chat completions have in common, before and after the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

from fastapi import Request

from vllm.entrypoints.openai.delivery import reply_files
from vllm.entrypoints.openai.logprobs import TokenName, name_by_id, name_by_text
from vllm.entrypoints.openai.prompts import PromptTokens
from vllm.entrypoints.openai.protocol import GenerationBody, StreamOptions
from vllm.entrypoints.openai.responses import Usage
from vllm.entrypoints.openai.sampling import make_sampling_params
from vllm.entrypoints.openai.serving_models import check_model
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.transformers_utils.tokenizer import make_decoder
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.undelivered_files import UndeliveredFiles

GenerationT = TypeVar("GenerationT", bound=GenerationBody)


@dataclass(frozen=True)
class Incoming(Generic[GenerationT]):
    """A request whose body has the right form."""

    state: ServerState
    body: GenerationT
    request_id: str
    arrival_time: float
    """Unix time."""

    @classmethod
    def take(cls, state: ServerState, prefix: str, request: Request, body: GenerationT) -> Self:
        """Its id is ``<prefix>-<id>``: the client's (header, then field), or 16 hex digits.

        ApiError: the model is another one.
        """
        check_model(state, body.model)
        asked = request.headers.get("x-request-id") or body.request_id
        return cls(state, body, f"{prefix}-{asked or uuid.uuid4().hex[:16]}", time.time())

    @property
    def token_name(self) -> TokenName:
        """How tokens read in log-probabilities."""
        if self.body.return_tokens_as_token_ids:
            return name_by_id
        return name_by_text(lambda ids: make_decoder(self.state.engine.get_tokenizer())(ids))

    def process(
        self,
        prompt: PromptTokens,
        *,
        suffix: str = "",
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> ProcessedInput:
        """The engine's request for one prompt. ValueError, ApiError: it cannot be served."""
        params = make_sampling_params(
            self.state,
            self.body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return self.state.engine.input_processor.process(
            self.request_id + suffix,
            {
                "prompt_token_ids": prompt.token_ids,
                "prompt": prompt.text,
                "cache_salt": self.body.cache_salt,
            },
            params,
            arrival_time=self.arrival_time,
            priority=self.body.priority or 0,
        )


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

    @property
    def files(self) -> UndeliveredFiles:
        """The files that the answer names."""
        return reply_files(self.request.scope)

    def transfer_params(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """What the connector says of a continuation, with the file's URL where it has one."""
        params = completion.kv_transfer_params
        store = self.state.store
        if params is None or store is None:
            return params
        path = params.get("hidden_states_path")
        url = store.url_for(self.request, path) if isinstance(path, str) else None
        return params if url is None else {**params, "hidden_states_url": url}
