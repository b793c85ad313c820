"""A streamed completion, chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.completion_request import PreparedCompletion, logprobs_of
from vllm.entrypoints.openai.generation import Answering, StreamUsage
from vllm.entrypoints.openai.responses import (
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    Usage,
)
from vllm.entrypoints.openai.runs import stream_all
from vllm.entrypoints.openai.state import EngineClient
from vllm.outputs import CompletionOutput, RequestOutput


class CompletionStream:
    """Outputs of a prepared request -> chunks. For one stream.

    The first chunk of a choice carries what ``echo`` and ``return_token_ids`` add, its last
    one what the KV connector says of it.
    """

    def __init__(self, prepared: PreparedCompletion, answering: Answering) -> None:
        self._prepared = prepared
        self._answering = answering
        body = prepared.body
        self._choices_per_prompt = body.n or 1
        lengths = [len(one.request.prompt_token_ids) for one in prepared.requests]
        self._usage = StreamUsage(body.stream_options, lengths)
        self._text_lengths: dict[int, int] = {}
        """Of the choices that have begun."""
        self._num_unfinished = len(lengths) * self._choices_per_prompt
        self._first_transfer_params: dict[str, Any] | UnsetType = UNSET

    async def chunks(self, engine: EngineClient) -> AsyncGenerator[CompletionChunk, None]:
        """All chunks. Leaving the iteration aborts the request."""
        async with aclosing(stream_all(engine, self._prepared.requests)) as outputs:
            async for prompt_index, output in outputs:
                for completion in output.outputs:
                    yield self._chunk(prompt_index, output, completion)
        if self._usage.at_end:
            yield self._make([], self._usage.total(), self._first_transfer_params)

    def _chunk(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChunk:
        index = prompt_index * self._choices_per_prompt + completion.index
        self._usage.add(index, len(completion.token_ids))
        choice = self._choice(index, prompt_index, output, completion)
        top_level: dict[str, Any] | UnsetType = UNSET
        if completion.finish_reason is not None:
            self._num_unfinished -= 1
            choice.kv_transfer_params = self._answering.transfer_params(completion) or UNSET
            if index == 0:
                self._first_transfer_params = choice.kv_transfer_params
            top_level = self._first_transfer_params
        in_every = self._usage.in_every_chunk
        usage = self._usage.of_choice(index, prompt_index) if in_every else None
        return self._make([choice], usage, top_level)

    def _choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChunkChoice:
        prepared = self._prepared
        is_first = index not in self._text_lengths
        text = completion.text if prepared.shows_output else ""
        if is_first and prepared.echo_texts is not None:
            text = prepared.echo_texts[prompt_index] + text
        offset = self._text_lengths.get(index, 0)
        logprobs = self._logprobs(output, completion, is_first, offset)
        self._text_lengths[index] = offset + (
            len(text) if logprobs is None else sum(map(len, logprobs.tokens))
        )
        wants_ids = bool(prepared.body.return_token_ids)
        return CompletionChunkChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_token_ids=output.prompt_token_ids if wants_ids and is_first else None,
            token_ids=list(completion.token_ids) if wants_ids else None,
        )

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, is_first: bool, offset: int
    ) -> CompletionLogprobs | None:
        with_prompt = is_first and self._prepared.echo_texts is not None
        return logprobs_of(self._prepared, output, completion, with_prompt, offset)

    def _make(
        self,
        choices: list[CompletionChunkChoice],
        usage: Usage | None,
        transfer_params: dict[str, Any] | UnsetType,
    ) -> CompletionChunk:
        is_last_text = bool(choices) and self._num_unfinished == 0
        answering = self._answering
        return CompletionChunk(
            id=self._prepared.request_id,
            created=answering.created,
            model=answering.model,
            choices=choices,
            usage=usage,
            system_fingerprint=answering.system_fingerprint if is_last_text else UNSET,
            kv_transfer_params=transfer_params,
        )


__all__ = ["CompletionStream"]
