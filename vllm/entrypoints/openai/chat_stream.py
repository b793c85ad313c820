"""A streamed chat completion, chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.chat_request import PreparedChat, logprobs_of
from vllm.entrypoints.openai.generation import Answering, StreamUsage
from vllm.entrypoints.openai.responses import ChatChunk, ChatChunkChoice, Delta, Usage
from vllm.entrypoints.openai.runs import stream_all
from vllm.entrypoints.openai.state import EngineClient
from vllm.entrypoints.openai.tool_parsers import ToolParser
from vllm.outputs import CompletionOutput


class ChatStream:
    """Outputs of a prepared request -> chunks. For one stream.

    Each choice begins with a chunk that names the role, and ends with one that carries why
    it ended and what the KV connector says of it.
    """

    def __init__(self, prepared: PreparedChat, answering: Answering) -> None:
        self._prepared = prepared
        self._answering = answering
        body = prepared.body
        request = prepared.processed.request
        self._prompt_ids = request.prompt_token_ids
        self._usage = StreamUsage(body.stream_options, [len(self._prompt_ids)])
        self._parsers: dict[int, ToolParser | None] = {}
        """Of the choices that have begun."""
        self._num_unfinished = body.n or 1
        self._first_transfer_params: dict[str, Any] | UnsetType = UNSET

    async def chunks(self, engine: EngineClient) -> AsyncGenerator[ChatChunk, None]:
        """All chunks. Leaving the iteration aborts the request."""
        async with aclosing(stream_all(engine, [self._prepared.processed])) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    if completion.index not in self._parsers:
                        yield self._role_chunk(completion.index)
                    yield self._chunk(completion)
        if self._usage.at_end:
            chunk = self._make([], self._usage.total())
            chunk.kv_transfer_params = self._first_transfer_params
            yield chunk

    def _role_chunk(self, index: int) -> ChatChunk:
        parser = self._prepared.tool_parser
        self._parsers[index] = parser() if parser is not None else None
        choice = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        chunk = self._make([choice], self._usage_now(index))
        if self._prepared.body.return_token_ids:
            chunk.prompt_token_ids = self._prompt_ids
        return chunk

    def _chunk(self, completion: CompletionOutput) -> ChatChunk:
        index = completion.index
        self._usage.add(index, len(completion.token_ids))
        is_last = completion.finish_reason is not None
        delta, finish_reason = self._delta(completion)
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs_of(self._prepared, completion),
            finish_reason=finish_reason,
            token_ids=list(completion.token_ids) if self._prepared.body.return_token_ids else None,
        )
        chunk = self._make([choice], self._usage_now(index))
        if is_last:
            self._end(chunk, choice, completion)
        return chunk

    def _end(self, chunk: ChatChunk, choice: ChatChunkChoice, completion: CompletionOutput) -> None:
        """Add to the last chunk of a choice what is known now."""
        choice.stop_reason = completion.stop_reason
        choice.kv_transfer_params = self._answering.transfer_params(completion) or UNSET
        if completion.index == 0:
            self._first_transfer_params = choice.kv_transfer_params
        chunk.kv_transfer_params = self._first_transfer_params
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            chunk.system_fingerprint = self._answering.system_fingerprint

    def _delta(self, completion: CompletionOutput) -> tuple[Delta, str | None]:
        """What is new of a choice, and why it ended if it has."""
        parser = self._parsers[completion.index]
        reason = completion.finish_reason
        if parser is None:
            return Delta(content=completion.text), reason
        new = parser.push(completion.text, is_last=reason is not None)
        delta = Delta(
            content=new.content if new.content else UNSET,
            tool_calls=new.tool_calls if new.tool_calls else UNSET,
        )
        return delta, "tool_calls" if parser.num_calls and reason == "stop" else reason

    def _usage_now(self, index: int) -> Usage | UnsetType:
        return self._usage.of_choice(index, 0) if self._usage.in_every_chunk else UNSET

    def _make(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType) -> ChatChunk:
        return ChatChunk(
            id=self._prepared.request_id,
            created=self._answering.created,
            model=self._answering.model,
            choices=choices,
            usage=usage,
        )


__all__ = ["ChatStream"]
