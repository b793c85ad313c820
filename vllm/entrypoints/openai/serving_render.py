"""What a request becomes before it reaches the engine: token ids and settings, no run."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai import chat_request, completion_request
from vllm.entrypoints.openai.openapi import answers, takes
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
)
from vllm.entrypoints.openai.request_body import read_body
from vllm.entrypoints.openai.responses import RenderedRequest, json_response
from vllm.entrypoints.openai.state import ServerState
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import ProcessedInput


def rendered(
    state: ServerState, body: GenerationBody, request_id: str, processed: ProcessedInput
) -> RenderedRequest:
    """A request as the engine would get it."""
    request = processed.request
    options = body.stream_options
    return RenderedRequest(
        request_id=request_id,
        token_ids=request.prompt_token_ids,
        sampling_params=_settings(request.sampling_params),
        model=body.model or state.model_name,
        return_token_ids=body.return_token_ids,
        stream=bool(body.stream),
        stream_options=options.model_dump() if options is not None else None,
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_transfer_params=body.kv_transfer_params,
    )


def _settings(params: SamplingParams) -> dict[str, Any]:
    """The settings that users can set."""
    settings: dict[str, Any] = msgspec.to_builtins(params, str_keys=True)
    return {name: value for name, value in settings.items() if not name.startswith("_")}


def make_router(state: ServerState) -> APIRouter:
    """/v1/completions/render and /v1/chat/completions/render."""
    router = APIRouter()

    @router.post(
        "/v1/completions/render",
        openapi_extra=takes(CompletionRequest),
        responses=answers("RenderedRequest", 400, 404, 413, 503, is_list=True),
    )
    async def render_completion(request: Request) -> Response:
        """Token ids and settings of each prompt of a completion request."""
        body = await read_body(request, CompletionRequest)
        prepared = await completion_request.prepare_beside_loop(state, body, request)
        return json_response(
            [rendered(state, body, prepared.request_id, one) for one in prepared.requests]
        )

    @router.post(
        "/v1/chat/completions/render",
        openapi_extra=takes(ChatCompletionRequest),
        responses=answers("RenderedRequest", 400, 404, 413, 503),
    )
    async def render_chat_completion(request: Request) -> Response:
        """Token ids and settings of a chat request."""
        body = await read_body(request, ChatCompletionRequest)
        prepared = await chat_request.prepare_beside_loop(state, body, request)
        return json_response(rendered(state, body, prepared.request_id, prepared.processed))

    return router


__all__ = ["make_router"]
