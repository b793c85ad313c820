"""A chat request: rendered, checked, ready for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from vllm.entrypoints.chat_utils import render_chat
from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import Incoming
from vllm.entrypoints.openai.logprobs import TokenName, chat_logprobs
from vllm.entrypoints.openai.prompts import PromptTokens, fit_prompt
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ChatFields, Messages
from vllm.entrypoints.openai.responses import ChatLogprobs
from vllm.entrypoints.openai.sampling import check_asked_max_tokens, resolve_max_tokens
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.tool_parsers import TOOL_PARSERS, ToolParser
from vllm.outputs import CompletionOutput
from vllm.v1.engine.input_processor import ProcessedInput


@dataclass(frozen=True)
class PreparedChat:
    """A checked request."""

    body: ChatCompletionRequest
    request_id: str
    requests: list[ProcessedInput]
    tool_parser: type[ToolParser] | None
    """Finds tool calls in the answer; None: the answer is text."""
    token_name: TokenName

    @property
    def processed(self) -> ProcessedInput:
        """The one engine request."""
        return self.requests[0]


def prepare(incoming: Incoming[ChatCompletionRequest]) -> PreparedChat:
    """Render, tokenise and check everything. ValueError, ApiError: it cannot be served."""
    state, body = incoming.state, incoming.body
    tool_parser = _choose_tool_parser(state, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: only with logprobs=true", "top_logprobs")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_asked_max_tokens(asked, state.max_model_len)
    rendered = render(state, body.messages, body, bool(body.add_special_tokens))
    token_ids = fit_prompt(state, rendered.token_ids, body, asked)
    processed = incoming.process(
        PromptTokens(token_ids, rendered.text),
        max_tokens=resolve_max_tokens(asked, None, len(token_ids), state.max_model_len),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return PreparedChat(body, incoming.request_id, [processed], tool_parser, incoming.token_name)


def render(
    state: ServerState, messages: Messages, fields: ChatFields, add_special_tokens: bool
) -> PromptTokens:
    """Token ids and text of a conversation.

    ``add_special_tokens``: besides those that the template writes.
    """
    if fields.chat_template is not None:
        raise bad_request("chat_template: this server does not take templates from requests")
    tokenizer = state.engine.get_tokenizer()
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
    return await state.beside_loop(prepare, Incoming.take(state, "chatcmpl", request, body))


def logprobs_of(prepared: PreparedChat, completion: CompletionOutput) -> ChatLogprobs | None:
    """Of the completion's tokens; None: nobody asked."""
    if completion.logprobs is None:
        return None
    num_top = prepared.body.top_logprobs or 0
    return chat_logprobs(completion.token_ids, completion.logprobs, num_top, prepared.token_name)
