"""/v1/completions: continue texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.completion_request import (
    PreparedCompletion,
    logprobs_of,
    prepare_beside_loop,
)
from vllm.entrypoints.openai.completion_stream import CompletionStream
from vllm.entrypoints.openai.generation import Answering, usage_of
from vllm.entrypoints.openai.logprobs import prompt_logprobs_body
from vllm.entrypoints.openai.openapi import answers, takes
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.request_body import read_body
from vllm.entrypoints.openai.responses import (
    CompletionChoice,
    CompletionResponse,
    json_response,
)
from vllm.entrypoints.openai.runs import finish_all
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.streaming import WhileConnected, open_stream
from vllm.outputs import CompletionOutput, RequestOutput


class CompletionAnswer:
    """Outputs of a prepared request -> the answer."""

    def __init__(self, prepared: PreparedCompletion, answering: Answering) -> None:
        self._prepared = prepared
        self._answering = answering

    def response(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """The whole answer."""
        choices: list[CompletionChoice] = []
        for prompt_index, output in enumerate(outputs):
            for completion in output.outputs:
                choices.append(self._choice(len(choices), prompt_index, output, completion))
        return CompletionResponse(
            id=self._prepared.request_id,
            created=self._answering.created,
            model=self._answering.model,
            choices=choices,
            system_fingerprint=self._answering.system_fingerprint,
            usage=usage_of(outputs),
            kv_transfer_params=choices[0].kv_transfer_params,
        )

    def _choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        prepared = self._prepared
        body = prepared.body
        prompt_ids = output.prompt_token_ids or []
        text = completion.text if prepared.shows_output else ""
        echo_text = prepared.echo_texts[prompt_index] if prepared.echo_texts is not None else ""
        return CompletionChoice(
            index=index,
            text=echo_text + text,
            logprobs=logprobs_of(
                prepared, output, completion, with_prompt=prepared.echo_texts is not None
            ),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=list(completion.token_ids) if body.return_token_ids else None,
            prompt_logprobs=(
                prompt_logprobs_body(output.prompt_logprobs)
                if body.prompt_logprobs is not None
                else None
            ),
            prompt_token_ids=prompt_ids if body.return_token_ids else None,
            kv_transfer_params=self._answering.transfer_params(completion),
        )


def make_router(state: ServerState) -> APIRouter:
    """/v1/completions."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        responses=answers(
            "CompletionResponse",
            *(400, 404, 413, 429, 500, 503, 507),
            stream_of="CompletionChunk",
        ),
    )
    async def create_completion(request: Request) -> Response:
        """Continue a prompt, or each of a list: texts or token ids."""
        body = await read_body(request, CompletionRequest)
        async with WhileConnected(request.receive):
            prepared = await prepare_beside_loop(state, body, request)
            answering = Answering.begin(state, request)
            if body.stream:
                stream = CompletionStream(prepared, answering)
                return await open_stream(lambda: stream.chunks(state.client))
            outputs = await finish_all(state.client, prepared.requests)
        return json_response(CompletionAnswer(prepared, answering).response(outputs))

    return router


__all__ = ["make_router"]
