"""One generation request, from its body to its reply: the common part of completions and chats.

    body -> prompts -> the engine's requests -> outputs -> reply, or events of a stream

:class:`Generation` has these steps. Its subclasses, ``completion.Completion`` and ``chat.Chat``,
make the prompts and shape the reply.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import (
    MEANT_FOR_CLIENTS,
    as_api_error,
    bad_request,
    failed,
)
from vllm.entrypoints.openai.extraction import Extraction, as_output, requested_rows
from vllm.entrypoints.openai.lens_replies import check_lens, lens_tensor
from vllm.entrypoints.openai.limits import reply_files
from vllm.entrypoints.openai.protocol import GenerationBody, StreamOptions, told_of_unknown
from vllm.entrypoints.openai.request_prompts import (
    check_max_tokens,
    fit,
    make_sampling_params,
)
from vllm.entrypoints.openai.responses import (
    Chunk,
    HiddenStatesBody,
    PromptLogprob,
    PromptLogprobsBody,
    RenderedRequest,
    Reply,
    TransferParams,
    Usage,
)
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.steering import requested_steering
from vllm.inputs import ParsedPrompt
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.steering import SteeringVector
from vllm.utils.async_utils import merge_async_iterators
from vllm.utils.text import brief
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.renderer_threads import LONG_BYTES

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)

BodyT = TypeVar("BodyT", bound=GenerationBody)
LOWEST_LOGPROB = -9999.0


class Wanted(NamedTuple):
    """The options of a body for the engine, in addition to its sampling settings."""

    prompts: Iterable[ParsedPrompt]
    """The prompts, made one by one; iteration raises ValueError or ApiError for an invalid one."""
    max_tokens: int | None
    logprobs: int | None
    """Most likely tokens to report at each position."""
    prompt_logprobs: int | None


class News(NamedTuple):
    """The new part of one choice, or all of it."""

    choice: int
    """Number of the choice over all prompts."""
    output: RequestOutput
    completion: CompletionOutput


class Generation(ABC, Generic[BodyT]):
    """One generation request; its choices are ``body.n`` continuations of each prompt.

    The constructor raises ApiError if the model is not served.
    """

    id_prefix: ClassVar[str]
    default_max_tokens: ClassVar[int | None] = None
    """None: as many as there is room for."""
    reply_type: ClassVar[type[Any]]
    chunk_type: ClassVar[type[Chunk]]
    is_quick = False
    """True if :meth:`_prepare` takes less time than handing it to a thread."""

    def __init__(self, state: ServerState, body: BodyT, request: Request) -> None:
        state.check_model(body.model)
        self._adapter = state.adapters.find(body.model)
        client_id = request.headers.get("x-request-id") or body.request_id
        self.id = f"{self.id_prefix}-{client_id or uuid.uuid4().hex[:16]}"
        self.arrival_time = time.time()
        self.state = state
        self.body = body
        self.requests: list[ProcessedInput] = []
        """The engine's requests, one per prompt, after :meth:`prepare`."""
        rows = requested_rows(body)
        self.extraction = (
            None if rows is None else Extraction(state, rows, body.priority, request.scope)
        )
        """The rows that the body asks for."""
        self.prompts: list[ParsedPrompt] = []
        self._steering: list[SteeringVector] = []
        self._params: SamplingParams | None = None
        """Settings of a request that asks for rows."""
        self._request = request
        self._files = reply_files(request.scope)
        self._num_tokens: Counter[int] = Counter()
        """Tokens sent so far, by choice that a stream has begun."""
        self._num_ended = 0
        self._bodies: dict[int, HiddenStatesBody] = {}
        """Rows for the last event of each choice."""
        self._first_params: TransferParams | None = None
        keys = state.unknown_transfer_keys(body.kv_transfer_params or {})
        names = [f"kv_transfer_params.{key}" for key in keys]
        self._warnings = [*body._warnings, *told_of_unknown(names, state.settings.strict_requests)]
        """Texts that the client has not been sent yet."""

    @abstractmethod
    def wanted(self) -> Wanted:
        """Return the options of the body; raises ApiError if they conflict."""

    def request_id(self, prompt_index: int) -> str:
        """Return the id of the engine's request for a prompt; names of files begin with it."""
        return self.id

    @abstractmethod
    def make_choice(self, news: News) -> Any:
        """Make a choice of the reply."""

    def more_of_reply(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields that only this kind of reply has."""
        return {}

    @abstractmethod
    def make_chunk_choice(self, news: News) -> Any:
        """Make a choice of a stream's event."""

    def make_first_chunk(self, news: News) -> Chunk | None:
        """Make an extra event that begins a choice; None if there is none."""
        return None

    # ---- from the body to the engine

    async def prepare(self) -> None:
        """Tokenise and check everything; raises ValueError or ApiError if it cannot be served."""
        if self.is_quick and len(await self._request.body()) <= LONG_BYTES:
            self._prepare()
        else:
            await self.state.beside_loop(self._request, self._prepare)

    def _prepare(self) -> None:
        options = self.wanted()
        self._steering = requested_steering(self.state, self.body)
        max_tokens = options.max_tokens
        if self.extraction is not None:
            max_tokens = max_tokens or 0
        if self.extraction is None or max_tokens:
            check_max_tokens(max_tokens, self.state.max_model_len)
            max_tokens = _least(max_tokens, self.state.most_output_tokens)
        self.prompts = [fit(self.state, one, self.body, max_tokens) for one in options.prompts]
        if self.extraction is None:
            self._check_path(len(self.prompts) * (self.body.n or 1))
            self.requests = [
                self._process(index, prompt, options) for index, prompt in enumerate(self.prompts)
            ]
            check_lens(self.state, self.body, self.requests)
            return
        logprobs = options.logprobs
        self._params = make_sampling_params(
            self.state, self.body, self._steering, max_tokens=max_tokens, logprobs=logprobs
        )
        self.extraction.steering = self._params.steering_specs
        self.extraction.adapter = self._adapter

    def _check_path(self, num_choices: int) -> None:
        """Raise ApiError if several choices would write the file at one path, one after another."""
        path = (self.body.kv_transfer_params or {}).get("hidden_states_path")
        if num_choices > 1 and path is not None and self.state.lets_clients_name_files:
            raise bad_request(
                f"hidden_states_path={brief(path)} is one path, and this request has {num_choices} "
                "choices; give each its own request and path, or leave the path out"
            )

    def _process(self, index: int, prompt: ParsedPrompt, options: Wanted) -> ProcessedInput:
        state, body, max_tokens = self.state, self.body, options.max_tokens
        if max_tokens is None:
            max_tokens = self.default_max_tokens
        room = state.max_model_len - len(prompt.token_ids or ())
        # A prompt that leaves no room is refused by the engine.
        max_tokens = _least(max_tokens, room if room > 0 else None, state.most_output_tokens)
        params = make_sampling_params(
            state,
            body,
            self._steering,
            max_tokens=max_tokens,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
        )
        return state.engine.input_processor.process(
            self.request_id(index),
            prompt,
            params,
            arrival_time=self.arrival_time,
            priority=body.priority or 0,
            lora_request=self._adapter,
        )

    async def render(self) -> list[RenderedRequest]:
        """Return the requests that the engine would get, with the settings that users can set."""
        self.extraction = None
        await self.prepare()
        return [self._rendered(processed.request) for processed in self.requests]

    def _rendered(self, request: EngineCoreRequest) -> RenderedRequest:
        body = self.body
        settings: dict[str, Any] = msgspec.to_builtins(request.sampling_params, str_keys=True)
        return RenderedRequest(
            request_id=self.id,
            token_ids=request.prompt_token_ids,
            sampling_params={name: value for name, value in settings.items() if name[0] != "_"},
            model=body.model or self.state.model_name,
            return_token_ids=body.return_token_ids,
            stream=bool(body.stream),
            stream_options=body.model_dump(include={"stream_options"})["stream_options"],
            cache_salt=request.cache_salt,
            priority=request.priority,
            kv_transfer_params=body.kv_transfer_params,
        )

    # ---- from the engine to the reply

    async def answer(self) -> Reply | Response:
        """Return the reply, or a stream as soon as its first event exists.

        Raises ValueError or ApiError if the request cannot be served, or fails before that.
        """
        await self.prepare()
        if self.extraction is None:
            await self._check_quota()
        elif not self.body.stream:
            return await self._answer_with_rows(self.extraction)
        if self.body.stream:
            chunks = self._chunks()
            return EventStream(self._events(await anext(chunks), chunks))
        outputs = await self._all_outputs()
        reply = self._make_reply(outputs)
        if (activations := outputs[0].activations) is None:
            return reply
        return await asyncio.to_thread(self._encoded, reply, activations)

    def _encoded(self, reply: Reply, activations: Mapping[str, torch.Tensor]) -> Response:
        """Encode a reply with large texts, which FastAPI would check, and on the event loop."""
        reply.activations = {name: lens_tensor(tensor) for name, tensor in activations.items()}
        return Response(reply.model_dump_json(), media_type="application/json")

    async def outputs(self) -> list[RequestOutput]:
        """Return the output of each prompt, instead of a reply; raises what :meth:`answer` does."""
        await self.prepare()
        await self._check_quota()
        return await self._all_outputs()

    async def _check_quota(self) -> None:
        """Raise QuotaExceededError if the request would write a file, and there is no room."""
        store = self.state.store if self.state.extracts else None
        if store is not None and store.writes_file(self.body.kv_transfer_params):
            await store.admit()

    async def _all_outputs(self) -> list[RequestOutput]:
        async with aclosing(self._outputs()) as outputs:
            ended = {index: output async for index, output in outputs if output.finished}
        return [ended[index] for index in range(len(self.requests))]

    async def _answer_with_rows(self, extraction: Extraction) -> Response:
        assert self._params is not None
        count, params = self.body.n or 1, self._params if self._params.max_tokens else None
        if params is None and len(self.prompts) * count == 1:
            stream = await extraction.begin_stream(self.prompts[0])
            if stream is not None:
                return stream
        samples = await extraction.run(self.prompts, params, count)
        if extraction.is_stream:
            return await extraction.stream(samples[0])
        names = [self.request_id(index // count) for index in range(len(samples))]
        rows = await extraction.bodies(samples, names, self._request, self._files)
        outputs = [
            as_output(prompt, samples[index * count : (index + 1) * count])
            for index, prompt in enumerate(self.prompts)
        ]
        reply = self._make_reply(outputs, rows)
        # FastAPI would check large texts, and encode them on the event loop.
        content = await asyncio.to_thread(reply.model_dump_json)
        return Response(content, media_type="application/json")

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (index of the prompt, its new output). Leaving the iteration aborts the requests.

        Raises ApiError if a request failed.
        """
        return merge_async_iterators([self._run(request) for request in self.requests])

    async def _outputs_with_rows(
        self, extraction: Extraction
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield what :meth:`_outputs` does; the rows of a choice are there with its last output."""
        params, count = self._params, self.body.n or 1
        params = params if params is not None and params.max_tokens else None
        async with aclosing(extraction.run_stream(self.prompts, params, count)) as outputs:
            async for index, output, sample in outputs:
                if sample is not None:
                    (new,) = output.outputs
                    names = [self.request_id(index)]
                    (body,) = await extraction.bodies([sample], names, self._request, self._files)
                    self._bodies[index * count + new.index] = body
                yield index, output

    async def _run(self, request: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, and record their files before the outputs wait for others:
        no other code knows these files."""
        async with aclosing(self.state.engine.run(request)) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    self._files.add(completion.kv_transfer_params)
                for completion in output.outputs:
                    if completion.failure is not None:
                        raise failed(completion.failure)
                yield output

    def _make_reply(
        self, outputs: list[RequestOutput], rows: Sequence[HiddenStatesBody] = ()
    ) -> Reply:
        """Make the reply of all outputs; ``rows``: those of each choice, if there are any."""
        choices = [
            self.make_choice(news)
            for prompt_index, output in enumerate(outputs)
            for news in self._news_of(prompt_index, output)
        ]
        for choice, body in zip(choices, rows, strict=False):
            choice.hidden_states = body
        num_prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
        num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        reply: Reply = self.reply_type(
            **self.in_every_answer(),
            choices=choices,
            system_fingerprint=self.state.system_fingerprint,
            usage=Usage.of(num_prompt_tokens, num_tokens, self._num_cached(outputs)),
            warnings=self._warnings or None,
            kv_transfer_params=choices[0].kv_transfer_params,
            **self.more_of_reply(outputs[0]),
        )
        return reply

    def _num_cached(self, outputs: Iterable[RequestOutput]) -> int | None:
        """Count the tokens of the prompts that were not computed; None: not known, or not told."""
        counts = [output.num_cached_tokens for output in outputs]
        known = [count for count in counts if count is not None]
        is_told = self.state.settings.enable_prompt_tokens_details and len(known) == len(counts)
        return sum(known) if is_told else None

    def _news_of(self, prompt_index: int, output: RequestOutput) -> Iterator[News]:
        first = prompt_index * (self.body.n or 1)
        return (News(first + one.index, output, one) for one in output.outputs)

    def in_every_answer(self) -> dict[str, Any]:
        """Return the fields of every reply and every event."""
        adapter = self._adapter
        model = self.state.model_name if adapter is None else adapter.lora_name
        return {"id": self.id, "created": int(self.arrival_time), "model": model}

    def in_every_choice(self, news: News) -> dict[str, Any]:
        """Return the fields of every choice."""
        completion = news.completion
        return {
            "index": news.choice,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self.body.return_token_ids else None,
            "kv_transfer_params": self._transfer_params(completion.kv_transfer_params),
        }

    def _transfer_params(self, params: TransferParams | None) -> TransferParams | None:
        """Return ``params``, with the URL of the file if it has one."""
        path = (params or {}).get("hidden_states_path")
        if params is None or self.state.store is None or not isinstance(path, str):
            return params
        url = self.state.store.url_for(self._request, path)
        return params if url is None else {**params, "hidden_states_url": url}

    def token_name(self, token_id: int, entry: Logprob | None) -> str:
        """Return the name of a token in log-probabilities."""
        if self.body.return_tokens_as_token_ids:  # different tokens may have the same text
            return f"token_id:{token_id}"
        return self.token_text(token_id, entry)

    def token_text(self, token_id: int, entry: Logprob | None) -> str:
        """Return the text of a token; without ``entry``, that of the first token of a prompt."""
        known = entry.decoded_token if entry is not None else None
        return self.state.decode([token_id]) if known is None else known

    # ---- streams

    async def _events(
        self, first: Chunk, rest: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(rest):
            try:
                yield as_event(first)
                async for chunk in rest:
                    yield as_event(chunk)
            except Exception as error:  # sent as an event: the status line was sent before
                if not isinstance(error, MEANT_FOR_CLIENTS):
                    logger.exception("a stream failed")
                self._files.discard()
                yield as_event(as_api_error(error).body())

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield all events of a stream. Leaving the iteration aborts the request."""
        options = self.body.stream_options or StreamOptions()
        always = options.include_usage and options.continuous_usage_stats
        extraction = self.extraction
        source = self._outputs() if extraction is None else self._outputs_with_rows(extraction)
        latest: dict[int, RequestOutput] = {}
        async with aclosing(source) as outputs:
            async for prompt_index, output in outputs:
                latest[prompt_index] = output
                for news in self._news_of(prompt_index, output):
                    for chunk in self._chunks_of(news):
                        if always:
                            chunk.usage = Usage.of(
                                len(output.prompt_token_ids or ()),
                                self._num_tokens[news.choice],
                                self._num_cached([output]),
                            )
                        yield chunk
        if options.include_usage:
            lengths = [len(prompt.token_ids or ()) for prompt in self.prompts]
            num_cached = self._num_cached(latest.values())
            usage = Usage.of(sum(lengths), self._num_tokens.total(), num_cached)
            yield self.make_chunk([], usage=usage, kv_transfer_params=self._first_params)

    def _chunks_of(self, news: News) -> Iterator[Chunk]:
        """Yield the events for the new part of a choice. The last event of a choice carries
        the KV connector's report on it, and that on the first choice if it is known."""
        if news.choice not in self._num_tokens and (first := self.make_first_chunk(news)):
            yield first
        self._num_tokens[news.choice] += len(news.completion.token_ids)
        choice = self.make_chunk_choice(news)
        choice.hidden_states = self._bodies.pop(news.choice, None)
        chunk = self.make_chunk([choice])
        if news.completion.finish_reason is not None:
            if news.choice == 0:
                self._first_params = choice.kv_transfer_params
            chunk.kv_transfer_params = self._first_params
            self._num_ended += 1
            if self._num_ended == len(self.prompts) * (self.body.n or 1):
                chunk.system_fingerprint = self.state.system_fingerprint
        yield chunk

    def make_chunk(self, choices: list[Any], **more: Any) -> Chunk:
        """Make an event with these choices; the first one has the warnings."""
        warnings, self._warnings = self._warnings or None, []
        answer = self.in_every_answer()
        return self.chunk_type(**answer, choices=choices, warnings=warnings, **more)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class EventStream(Response):
    """Server-sent events: ``events``, then ``[DONE]``; ``events`` is closed in any case."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        media_type = "text/event-stream; charset=utf-8"
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def as_event(body: BaseModel) -> bytes:
    """Return ``body`` as one server-sent event."""
    return f"data: {body.model_dump_json()}\n\n".encode()


def finite(entry: Logprob) -> float:
    """Return the log-probability as a finite number, because JSON cannot hold minus infinity."""
    return max(entry.logprob, LOWEST_LOGPROB)


def prompt_logprobs_body(rows: PromptLogprobs | None) -> PromptLogprobsBody | None:
    """Return the log-probabilities by token id, as a string."""

    def entry(one: Logprob) -> PromptLogprob:
        return {"logprob": finite(one), "rank": one.rank, "decoded_token": one.decoded_token}

    if rows is None:
        return None
    return [
        None if row is None else {str(token_id): entry(one) for token_id, one in row.items()}
        for row in rows
    ]
