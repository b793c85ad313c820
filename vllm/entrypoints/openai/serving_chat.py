"""/v1/chat/completions: answer a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from vllm.entrypoints.openai.chat_request import (
    PreparedChat,
    logprobs_of,
    prepare_beside_loop,
)
from vllm.entrypoints.openai.chat_stream import ChatStream
from vllm.entrypoints.openai.generation import Answering, usage_of
from vllm.entrypoints.openai.logprobs import prompt_logprobs_body
from vllm.entrypoints.openai.openapi import answers, takes
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.request_body import read_body
from vllm.entrypoints.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionResponse,
    json_response,
)
from vllm.entrypoints.openai.runs import finish_all
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.streaming import WhileConnected, open_stream
from vllm.outputs import CompletionOutput, RequestOutput


def make_response(
    prepared: PreparedChat, answering: Answering, output: RequestOutput
) -> ChatCompletionResponse:
    """The whole answer."""
    choices = [_choice(prepared, answering, completion) for completion in output.outputs]
    wants_ids = bool(prepared.body.return_token_ids)
    return ChatCompletionResponse(
        id=prepared.request_id,
        created=answering.created,
        model=answering.model,
        choices=choices,
        system_fingerprint=answering.system_fingerprint,
        usage=usage_of([output]),
        prompt_logprobs=prompt_logprobs_body(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if wants_ids else None,
        prompt_text=output.prompt if wants_ids else None,
        kv_transfer_params=choices[0].kv_transfer_params,
    )


def _choice(
    prepared: PreparedChat, answering: Answering, completion: CompletionOutput
) -> ChatChoice:
    message, finish_reason = _message(prepared, completion)
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=logprobs_of(prepared, completion),
        finish_reason=finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=list(completion.token_ids) if prepared.body.return_token_ids else None,
        kv_transfer_params=answering.transfer_params(completion),
    )


def _message(
    prepared: PreparedChat, completion: CompletionOutput
) -> tuple[AnswerMessage, str | None]:
    """What the assistant says, and why it ended."""
    if prepared.tool_parser is None:
        return AnswerMessage(content=completion.text), completion.finish_reason
    found = prepared.tool_parser.parse(completion.text)
    has_ended = completion.finish_reason == "stop"
    message = AnswerMessage(
        content=found.content, tool_calls=found.tool_calls if found.tool_calls else UNSET
    )
    return message, "tool_calls" if found.tool_calls and has_ended else completion.finish_reason


def make_router(state: ServerState) -> APIRouter:
    """/v1/chat/completions."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatCompletionRequest),
        responses=answers(
            "ChatCompletionResponse",
            *(400, 404, 413, 429, 500, 503, 507),
            stream_of="ChatChunk",
        ),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatCompletionRequest)
        async with WhileConnected(request.receive):
            prepared = await prepare_beside_loop(state, body, request)
            answering = Answering.begin(state, request)
            if body.stream:
                stream = ChatStream(prepared, answering)
                return await open_stream(lambda: stream.chunks(state.client))
            outputs = await finish_all(state.client, [prepared.processed])
        return json_response(make_response(prepared, answering, outputs[0]))

    return router


__all__ = ["make_router"]
