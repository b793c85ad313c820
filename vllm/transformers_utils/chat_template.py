"""Conversations -> prompts, through the model's chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast, get_args

from jinja2 import Environment, TemplateError, nodes

from vllm.inputs import TokensPrompt
from vllm.transformers_utils.tokenizer import TokenizerLike

ChatMessage: TypeAlias = dict[str, Any]
"""``role`` and ``content``, and whatever else the template reads (``tool_calls``, ...)."""

ContentFormat = Literal["auto", "string", "openai"]
"""How templates get content: as one string, as a list of parts, or as they seem to need it."""

ResolvedContentFormat = Literal["string", "openai"]

_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Names that ``chat_template_kwargs`` cannot set: the request's own fields do."""


def resolve_content_format(asked: ContentFormat, template: object) -> ResolvedContentFormat:
    """The format for ``template``: "auto" is a list of parts if it can only walk over those.

    A template that also asks whether content ``is string`` takes strings as well.
    """
    if asked not in get_args(ContentFormat):
        raise ValueError(
            f"chat_template_content_format={asked!r}: use {', '.join(get_args(ContentFormat))}"
        )
    if asked != "auto":
        return asked
    if not isinstance(template, str):
        return "string"
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return "string"
    walks = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    takes_strings = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return "openai" if walks and not takes_strings else "string"


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression reads ``x.content`` or ``x["content"]``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    return False


def load_chat_template(value: str | None) -> str | None:
    """A template from what a user gave: a file, or the text itself. ValueError: it is neither."""
    if value is None:
        return None
    if os.path.isfile(value):
        with open(value, encoding="utf-8") as file:
            return file.read()
    if "{" in value:
        return value
    raise ValueError(
        f"chat_template={value!r}: there is no such file, and it is no template either "
        "(a Jinja template holds '{{' or '{%')"
    )


def as_conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[list[ChatMessage]]:
    """One conversation or several -> several."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={messages!r}: has to be a list of at least one message")
    if isinstance(messages[0], Mapping):
        return [cast(list[ChatMessage], list(messages))]
    return [cast(list[ChatMessage], conversation) for conversation in messages]


def parse_messages(
    messages: Sequence[ChatMessage], content_format: ContentFormat = "auto"
) -> list[ChatMessage]:
    """Copies of the messages in the form that templates expect; every field is kept.

    Text parts become one string (joined by line ends) unless ``content_format`` is
    "openai"; arguments of tool calls are parsed from JSON. ValueError names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={messages!r}: has to be a list of at least one message")
    parsed = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {position} is {message!r}: has to be a dict with a "role"')
        copy = dict(message)
        try:
            if "content" in copy:
                copy["content"] = _parse_content(copy["content"], content_format)
            if copy.get("tool_calls"):
                copy["tool_calls"] = [_parse_tool_call(call) for call in copy["tool_calls"]]
        except ValueError as error:
            raise ValueError(f"message {position}: {error}") from error
        parsed.append(copy)
    return parsed


def _parse_content(content: object, content_format: ContentFormat) -> object:
    if content is None:
        return [] if content_format == "openai" else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content_format == "openai" else content
    if not isinstance(content, list | tuple):
        raise ValueError(f"content={content!r}: has to be a string or a list of text parts")
    texts = [_part_text(part) for part in content]
    if content_format == "openai":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise ValueError(
            f'content part {part!r} is not supported: text only, {{"type": "text", "text": ...}}'
        )
    return text


def _parse_tool_call(call: object) -> object:
    """Arguments arrive as a JSON string; templates want the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f'tool call {call!r}: has to be a dict with a "function"')
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": function}


class ChatOptions(TypedDict, total=False):
    """Of :func:`chat_text`."""

    chat_template: str | None
    content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


def chat_text(
    tokenizer: TokenizerLike,
    messages: Sequence[ChatMessage],
    *,
    chat_template: str | None = None,
    content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The text of one conversation, with the special tokens that the template writes.

    ValueError: the template cannot render the messages.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message=True goes on with the last message, so "
            "add_generation_prompt has to be False"
        )
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give one with chat_template=")
    variables = chat_template_kwargs or {}
    reserved = sorted(_RESERVED_VARIABLES.intersection(variables))
    if reserved:
        raise ValueError(f"chat_template_kwargs: {reserved[0]!r} is set by the request itself")
    template = chat_template or tokenizer.chat_template
    conversation = parse_messages(messages, resolve_content_format(content_format, template))
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **variables,
        )
    except Exception as error:  # a template is a program: on odd messages it may raise anything
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ValueError(f"the chat template refused the messages: {kind}{error}") from error
    return text


def render_chat(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> TokensPrompt:
    """The prompt of one conversation: token ids, and the :func:`chat_text` they come from.

    The template writes the special tokens, so none are added.
    """
    text = chat_text(tokenizer, messages, **options)
    token_ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return {"prompt_token_ids": token_ids, "prompt": text}


__all__ = [
    "ChatMessage",
    "ChatOptions",
    "ContentFormat",
    "ResolvedContentFormat",
    "as_conversations",
    "chat_text",
    "load_chat_template",
    "parse_messages",
    "render_chat",
    "resolve_content_format",
]
