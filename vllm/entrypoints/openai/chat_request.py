"""A chat request: rendered, checked, ready for the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import Request

from vllm.entrypoints.chat_utils import render_chat
from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import make_request_id, token_namer
from vllm.entrypoints.openai.logprobs import TokenName, chat_logprobs
from vllm.entrypoints.openai.prompts import PromptTokens, fit_prompt
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ChatFields, Messages
from vllm.entrypoints.openai.responses import ChatLogprobs
from vllm.entrypoints.openai.sampling import (
    check_asked_max_tokens,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.serving_models import check_model
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.tool_parsers import TOOL_PARSERS, ToolParser
from vllm.outputs import CompletionOutput
from vllm.v1.engine.input_processor import ProcessedInput


@dataclass(frozen=True)
class PreparedChat:
    """A checked request."""

    body: ChatCompletionRequest
    request_id: str
    processed: ProcessedInput
    tool_parser: type[ToolParser] | None
    """Finds tool calls in the answer; None: the answer is text."""
    token_name: TokenName


def prepare(
    state: ServerState, body: ChatCompletionRequest, request_id: str, arrival_time: float
) -> PreparedChat:
    """Render, tokenise and check everything. ValueError, ApiError: it cannot be served."""
    check_model(state, body.model)
    tool_parser = _choose_tool_parser(state, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: only with logprobs=true", "top_logprobs")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_asked_max_tokens(asked, state.max_model_len)
    rendered = render(state, body.messages, body, bool(body.add_special_tokens))
    token_ids = fit_prompt(state, rendered.token_ids, body, asked)
    params = make_sampling_params(
        state,
        body,
        max_tokens=resolve_max_tokens(asked, None, len(token_ids), state.max_model_len),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    processed = state.client.input_processor.process(
        request_id,
        {
            "prompt_token_ids": token_ids,
            "prompt": rendered.text,
            "cache_salt": body.cache_salt,
        },
        params,
        arrival_time=arrival_time,
        priority=body.priority or 0,
    )
    return PreparedChat(body, request_id, processed, tool_parser, token_namer(state, body))


def render(
    state: ServerState, messages: Messages, fields: ChatFields, add_special_tokens: bool
) -> PromptTokens:
    """Token ids and text of a conversation.

    ``add_special_tokens``: besides those that the template writes.
    """
    if fields.chat_template is not None:
        raise bad_request("chat_template: this server does not take templates from requests")
    tokenizer = state.client.get_tokenizer()
    continues = bool(fields.continue_final_message)
    adds_prompt = fields.add_generation_prompt
    rendered = render_chat(
        tokenizer,
        [dict(message) for message in messages],
        chat_template=state.chat_template,
        content_format=state.content_format,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=fields.tools or None,
        chat_template_kwargs=fields.chat_template_kwargs,
    )
    text = rendered["prompt"]
    token_ids = rendered["prompt_token_ids"]
    if add_special_tokens:
        token_ids = tokenizer.encode(text or "", add_special_tokens=True, verbose=False)
    if not token_ids:
        raise bad_request("the chat template makes an empty prompt of these messages")
    return PromptTokens(token_ids, text)


def _choose_tool_parser(state: ServerState, body: ChatCompletionRequest) -> type[ToolParser] | None:
    """What looks for tool calls. ApiError: tools are asked for in a way that is not served."""
    choice = body.tool_choice or "auto"
    if not body.tools or choice == "none":
        return None
    if choice != "auto":
        raise bad_request(f"tool_choice={choice!r} is not supported: use 'auto' or 'none'")
    settings = state.settings
    if not settings.enable_auto_tool_choice or settings.tool_call_parser is None:
        raise bad_request(
            'tool_choice="auto" needs a server that was started with --enable-auto-tool-choice '
            "and --tool-call-parser"
        )
    return TOOL_PARSERS[settings.tool_call_parser]


async def prepare_beside_loop(
    state: ServerState, body: ChatCompletionRequest, request: Request
) -> PreparedChat:
    """:func:`prepare`, on a thread."""
    request_id, arrival_time = make_request_id("chatcmpl", request, body), time.time()
    return await asyncio.get_running_loop().run_in_executor(
        state.client.renderer, prepare, state, body, request_id, arrival_time
    )


def logprobs_of(prepared: PreparedChat, completion: CompletionOutput) -> ChatLogprobs | None:
    """Of the completion's tokens; None: nobody asked."""
    if completion.logprobs is None:
        return None
    num_top = prepared.body.top_logprobs or 0
    return chat_logprobs(completion.token_ids, completion.logprobs, num_top, prepared.token_name)


__all__ = ["PreparedChat", "logprobs_of", "prepare", "prepare_beside_loop", "render"]
