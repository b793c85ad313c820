"""/v1/completions and /v1/chat/completions, and what they make of a request (``/render``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from vllm.entrypoints.openai import chat_request, completion_request
from vllm.entrypoints.openai.chat_request import PreparedChat
from vllm.entrypoints.openai.completion_request import PreparedCompletion
from vllm.entrypoints.openai.generation import Answering, usage_of
from vllm.entrypoints.openai.generation_stream import ChatStream, CompletionStream
from vllm.entrypoints.openai.logprobs import prompt_logprobs_body
from vllm.entrypoints.openai.openapi import documented
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.openai.request_body import read_body
from vllm.entrypoints.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionChoice,
    CompletionResponse,
    RenderedRequest,
    json_response,
)
from vllm.entrypoints.openai.runs import finish_all
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.streaming import WhileConnected, open_stream
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.input_processor import ProcessedInput


def completion_response(
    prepared: PreparedCompletion, answering: Answering, outputs: Sequence[RequestOutput]
) -> CompletionResponse:
    """The whole answer."""
    choices: list[CompletionChoice] = []
    echo_texts = prepared.echo_texts or [""] * len(outputs)
    for echo_text, output in zip(echo_texts, outputs, strict=True):
        choices += [
            _completion_choice(prepared, answering, echo_text, output, completion)
            for completion in output.outputs
        ]
    for index, choice in enumerate(choices):
        choice.index = index
    return CompletionResponse(
        id=prepared.request_id,
        created=answering.created,
        model=answering.model,
        choices=choices,
        system_fingerprint=answering.system_fingerprint,
        usage=usage_of(outputs),
        kv_transfer_params=choices[0].kv_transfer_params,
    )


def _completion_choice(
    prepared: PreparedCompletion,
    answering: Answering,
    echo_text: str,
    output: RequestOutput,
    completion: CompletionOutput,
) -> CompletionChoice:
    body = prepared.body
    with_prompt = prepared.echo_texts is not None
    prompt_logprobs = output.prompt_logprobs if body.prompt_logprobs is not None else None
    return CompletionChoice(
        index=completion.index,
        text=echo_text + (completion.text if prepared.shows_output else ""),
        logprobs=completion_request.logprobs_of(prepared, output, completion, with_prompt),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=list(completion.token_ids) if body.return_token_ids else None,
        prompt_logprobs=prompt_logprobs_body(prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
        kv_transfer_params=answering.transfer_params(completion),
    )


def chat_response(
    prepared: PreparedChat, answering: Answering, outputs: Sequence[RequestOutput]
) -> ChatCompletionResponse:
    """The whole answer."""
    (output,) = outputs
    choices = [_chat_choice(prepared, answering, completion) for completion in output.outputs]
    wants_ids = bool(prepared.body.return_token_ids)
    return ChatCompletionResponse(
        id=prepared.request_id,
        created=answering.created,
        model=answering.model,
        choices=choices,
        system_fingerprint=answering.system_fingerprint,
        usage=usage_of(outputs),
        prompt_logprobs=prompt_logprobs_body(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if wants_ids else None,
        prompt_text=output.prompt if wants_ids else None,
        kv_transfer_params=choices[0].kv_transfer_params,
    )


def _chat_choice(
    prepared: PreparedChat, answering: Answering, completion: CompletionOutput
) -> ChatChoice:
    message, finish_reason = AnswerMessage(content=completion.text), completion.finish_reason
    if prepared.tool_parser is not None:
        message.content, calls = prepared.tool_parser.parse(completion.text)
        message.tool_calls = calls or UNSET
        finish_reason = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=chat_request.logprobs_of(prepared, completion),
        finish_reason=finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=list(completion.token_ids) if prepared.body.return_token_ids else None,
        kv_transfer_params=answering.transfer_params(completion),
    )


def rendered(
    state: ServerState, prepared: PreparedCompletion | PreparedChat, processed: ProcessedInput
) -> RenderedRequest:
    """A request as the engine would get it, with the settings that users can set."""
    request, body = processed.request, prepared.body
    settings: dict[str, Any] = msgspec.to_builtins(request.sampling_params, str_keys=True)
    return RenderedRequest(
        request_id=prepared.request_id,
        token_ids=request.prompt_token_ids,
        sampling_params={name: value for name, value in settings.items() if name[0] != "_"},
        model=body.model or state.model_name,
        return_token_ids=body.return_token_ids,
        stream=bool(body.stream),
        stream_options=body.model_dump(include={"stream_options"})["stream_options"],
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_transfer_params=body.kv_transfer_params,
    )


async def _generate(
    state: ServerState,
    request: Request,
    prepared: Any,
    make_stream: type[CompletionStream] | type[ChatStream],
    respond: Callable[..., msgspec.Struct],
) -> Response:
    """Run a prepared request: the answer, or the stream that it asks for."""
    answering = Answering.begin(state, request)
    if prepared.body.stream:
        stream: Any = make_stream(prepared, answering)
        return await open_stream(lambda: stream.chunks(state.engine), answering.files)
    outputs = await finish_all(state.engine, prepared.requests, answering.files)
    return json_response(respond(prepared, answering, outputs))


def make_router(state: ServerState) -> APIRouter:
    """The four endpoints."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        **documented(
            "CompletionResponse", 429, 500, 507, body=CompletionRequest, stream_of="CompletionChunk"
        ),
    )
    async def create_completion(request: Request) -> Response:
        """Continue a prompt, or each of a list: texts or token ids."""
        body = await read_body(request, CompletionRequest)
        async with WhileConnected(request.receive):
            prepared = await completion_request.prepare_beside_loop(state, body, request)
            return await _generate(state, request, prepared, CompletionStream, completion_response)

    @router.post(
        "/v1/chat/completions",
        **documented(
            *("ChatCompletionResponse", 429, 500, 507),
            body=ChatCompletionRequest,
            stream_of="ChatChunk",
        ),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatCompletionRequest)
        async with WhileConnected(request.receive):
            prepared = await chat_request.prepare_beside_loop(state, body, request)
            return await _generate(state, request, prepared, ChatStream, chat_response)

    @router.post(
        "/v1/completions/render",
        **documented("RenderedRequest", body=CompletionRequest, is_list=True),
    )
    async def render_completion(request: Request) -> Response:
        """Token ids and settings of each prompt of a completion request."""
        body = await read_body(request, CompletionRequest)
        prepared = await completion_request.prepare_beside_loop(state, body, request)
        return json_response([rendered(state, prepared, one) for one in prepared.requests])

    @router.post(
        "/v1/chat/completions/render", **documented("RenderedRequest", body=ChatCompletionRequest)
    )
    async def render_chat_completion(request: Request) -> Response:
        """Token ids and settings of a chat request."""
        body = await read_body(request, ChatCompletionRequest)
        prepared = await chat_request.prepare_beside_loop(state, body, request)
        return json_response(rendered(state, prepared, prepared.processed))

    return router
