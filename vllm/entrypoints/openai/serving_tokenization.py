"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.chat_request import render
from vllm.entrypoints.openai.errors import bad_form
from vllm.entrypoints.openai.openapi import documented
from vllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.openai.request_body import read_body
from vllm.entrypoints.openai.responses import DetokenizeResponse, TokenizeResponse, json_response
from vllm.entrypoints.openai.serving_models import check_model
from vllm.entrypoints.openai.state import ServerState
from vllm.transformers_utils.tokenizer import make_decoder

MAX_TOKEN_ID = 2**31 - 1
"""Tokenizers fail on ids beyond it; none has so many tokens."""


def tokenize(state: ServerState, body: TokenizeRequest) -> TokenizeResponse:
    """ValueError, ApiError: the text or conversation cannot be tokenised."""
    # A transformers tokenizer, which can do more than the engine needs of one.
    tokenizer: Any = state.engine.get_tokenizer()
    if body.messages is not None:
        token_ids = render(state, body.messages, body, bool(body.add_special_tokens)).token_ids
    elif body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt, add_special_tokens=adds_special, verbose=False)
    else:
        raise bad_form(("body.prompt", "Field required (or messages)"))
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=state.max_model_len,
        tokens=token_ids,
        token_strs=(tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None),
    )


def detokenize(state: ServerState, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of token ids: special tokens show, ids that no token has give nothing."""
    decode = make_decoder(state.engine.get_tokenizer())
    return DetokenizeResponse(decode([one for one in body.tokens if one <= MAX_TOKEN_ID]))


def make_router(state: ServerState) -> APIRouter:
    """/tokenize and /detokenize."""
    router = APIRouter()

    @router.post("/tokenize", **documented("TokenizeResponse", body=TokenizeRequest))
    async def tokenize_text(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body = await read_body(request, TokenizeRequest)
        check_model(state, body.model)
        return json_response(await state.beside_loop(tokenize, state, body))

    @router.post("/detokenize", **documented("DetokenizeResponse", body=DetokenizeRequest))
    async def detokenize_ids(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        check_model(state, body.model)
        return json_response(await state.beside_loop(detokenize, state, body))

    return router
