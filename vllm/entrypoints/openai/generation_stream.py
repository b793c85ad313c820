"""A streamed answer, chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai import chat_request, completion_request
from vllm.entrypoints.openai.chat_request import PreparedChat
from vllm.entrypoints.openai.completion_request import PreparedCompletion
from vllm.entrypoints.openai.generation import Answering, StreamUsage
from vllm.entrypoints.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    CompletionChunk,
    CompletionChunkChoice,
    Delta,
)
from vllm.entrypoints.openai.runs import stream_all
from vllm.entrypoints.openai.state import EngineClient
from vllm.entrypoints.openai.tool_parsers import ToolParser
from vllm.outputs import CompletionOutput, RequestOutput

PreparedT = TypeVar("PreparedT", PreparedCompletion, PreparedChat)
ChunkT = TypeVar("ChunkT", CompletionChunk, ChatChunk)


class GenerationStream(ABC, Generic[PreparedT, ChunkT]):
    """Outputs of a prepared request -> chunks. For one stream.

    The last chunk of a choice carries what the KV connector says of it; the last one of all
    what it says of the first choice.
    """

    _chunk_type: ClassVar[type[Any]]

    def __init__(self, prepared: PreparedT, answering: Answering) -> None:
        self._prepared: PreparedT = prepared
        self._answering = answering
        self._choices_per_prompt = prepared.body.n or 1
        lengths = [len(one.request.prompt_token_ids) for one in prepared.requests]
        self._usage = StreamUsage(prepared.body.stream_options, lengths)
        self._wants_ids = bool(prepared.body.return_token_ids)
        self._num_unfinished = len(lengths) * self._choices_per_prompt
        self._first_transfer_params: dict[str, Any] | UnsetType = UNSET

    async def chunks(self, engine: EngineClient) -> AsyncGenerator[ChunkT, None]:
        """All chunks. Leaving the iteration aborts the request."""
        run = stream_all(engine, self._prepared.requests, self._answering.files)
        async with aclosing(run) as outputs:
            async for prompt_index, output in outputs:
                for completion in output.outputs:
                    index = prompt_index * self._choices_per_prompt + completion.index
                    for chunk in self._chunks(index, output, completion):
                        if self._usage.in_every_chunk:
                            chunk.usage = self._usage.of_choice(index, prompt_index)
                        yield chunk
        if self._usage.at_end:
            last = self._make([])
            last.usage = self._usage.total()
            last.kv_transfer_params = self._first_transfer_params
            yield last

    @abstractmethod
    def _chunks(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[ChunkT]:
        """What is new of the choice ``index``."""

    def _make(self, choices: list[Any]) -> ChunkT:
        """A chunk with these choices, and nothing else that is not in every chunk."""
        chunk: ChunkT = self._chunk_type(
            id=self._prepared.request_id,
            created=self._answering.created,
            model=self._answering.model,
            choices=choices,
        )
        return chunk

    def _finish(
        self, choice: CompletionChunkChoice | ChatChunkChoice, completion: CompletionOutput
    ) -> ChunkT:
        """The chunk of a choice; if it is the choice's last, with what is known now."""
        self._usage.add(choice.index, len(completion.token_ids))
        choice.finish_reason = choice.finish_reason or completion.finish_reason
        choice.token_ids = list(completion.token_ids) if self._wants_ids else None
        chunk = self._make([choice])
        if completion.finish_reason is not None:
            choice.stop_reason = completion.stop_reason
            choice.kv_transfer_params = self._answering.transfer_params(completion) or UNSET
            if choice.index == 0:
                self._first_transfer_params = choice.kv_transfer_params
            chunk.kv_transfer_params = self._first_transfer_params
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                chunk.system_fingerprint = self._answering.system_fingerprint
        return chunk


class CompletionStream(GenerationStream[PreparedCompletion, CompletionChunk]):
    """The first chunk of a choice carries what ``echo`` and ``return_token_ids`` add."""

    _chunk_type = CompletionChunk

    def __init__(self, prepared: PreparedCompletion, answering: Answering) -> None:
        super().__init__(prepared, answering)
        self._text_lengths: dict[int, int] = {}
        """Of the choices that have begun."""

    def _chunks(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[CompletionChunk]:
        prepared = self._prepared
        is_first = index not in self._text_lengths
        with_prompt = is_first and prepared.echo_texts is not None
        text = completion.text if prepared.shows_output else ""
        if is_first and prepared.echo_texts is not None:
            text = prepared.echo_texts[index // self._choices_per_prompt] + text
        offset = self._text_lengths.get(index, 0)
        logprobs = completion_request.logprobs_of(prepared, output, completion, with_prompt, offset)
        length = len(text) if logprobs is None else sum(map(len, logprobs.tokens))
        self._text_lengths[index] = offset + length
        choice = CompletionChunkChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            stop_reason=None,
            prompt_token_ids=output.prompt_token_ids if self._wants_ids and is_first else None,
        )
        yield self._finish(choice, completion)


class ChatStream(GenerationStream[PreparedChat, ChatChunk]):
    """Each choice begins with a chunk that names the role."""

    _chunk_type = ChatChunk

    def __init__(self, prepared: PreparedChat, answering: Answering) -> None:
        super().__init__(prepared, answering)
        self._parsers: dict[int, ToolParser | None] = {}
        """Of the choices that have begun."""

    def _chunks(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[ChatChunk]:
        parser_type = self._prepared.tool_parser
        if index not in self._parsers:
            self._parsers[index] = parser_type() if parser_type is not None else None
            delta = Delta(role="assistant", content="")
            chunk = self._make([ChatChunkChoice(index=index, delta=delta)])
            if self._wants_ids:
                chunk.prompt_token_ids = self._prepared.processed.request.prompt_token_ids
            yield chunk
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(content=completion.text),
            logprobs=chat_request.logprobs_of(self._prepared, completion),
        )
        parser = self._parsers[index]
        if parser is not None:
            reason = completion.finish_reason
            new = parser.push(completion.text, is_last=reason is not None)
            choice.delta = Delta(content=new.content or UNSET, tool_calls=new.tool_calls or UNSET)
            if parser.num_calls and reason == "stop":
                choice.finish_reason = "tool_calls"
        yield self._finish(choice, completion)
