"""Messages of a conversation: checked, and written in the forms that a template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from vllm.utils.text import brief, parse_json

ChatMessage: TypeAlias = dict[str, Any]
"""``role`` and ``content``, and whatever else the template reads (``tool_calls``, ...)."""

ContentFormat = Literal["auto", "string", "openai"]
"""The form of content for templates: one string, a list of parts, or the form that they read."""

_TEXT_KINDS = ("text", "input_text", "output_text")
_OTHER_MEDIA = ("audio", "audios", "image", "images", "video", "videos")
"""Fields of a message for what is no text, as some clients and data sets have them."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields for the reasoning of an answer: DeepSeek's and most templates', vLLM's, gpt-oss'."""


class ContentForm(NamedTuple):
    """The forms of content that a template reads in the messages of one role."""

    takes_text: bool
    takes_parts: bool
    """A list of ``{"type": "text", "text": ...}``."""
    takes_one_part: bool = False
    """A list of one such part. A longer list may lose all parts but the first."""


Arguments = Literal["object", "text"]
CallShape = Literal["nested", "flat"]
NoContent = Literal["absent", "empty", "null"]


class CallForm(NamedTuple):
    """The form in which a template reads messages with tool calls."""

    arguments: Arguments = "object"
    call: CallShape = "nested"
    """``{"function": {"name": ..., "arguments": ...}}``, or the inner object by itself."""
    no_content: NoContent = "absent"
    """The content of a message that has calls and no text."""


def check_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Copies of the messages in one form, whatever a client wrote.

    Content is a text, a list of at least one text part, or absent. Calls are absent or at least
    one. Other fields are kept unless they are None, which transformers drops, too. ValueError
    names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={brief(messages)}: has to be a list of at least one message")
    checked = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'message {position} is {brief(message)}: has to be a dict with a "role"'
            )
        copy = _without_nulls(message)
        try:
            for field in filter(copy.get, _OTHER_MEDIA):
                raise ValueError(f"{field}={brief(copy[field])} is not supported: text only")
            if "content" in copy:
                copy["content"] = _check_content(copy["content"])
            if calls := copy.pop("tool_calls", None):
                copy["tool_calls"] = _check_calls(calls)
        except ValueError as error:
            raise ValueError(f"message {position}: {error}") from error
        checked.append(copy)
    return checked


def write_message(message: ChatMessage, form: ContentForm, call_form: CallForm) -> ChatMessage:
    """A message of :func:`check_messages` in the forms of a template."""
    written, content = dict(message), message.get("content")
    if "tool_calls" in message:
        written["tool_calls"] = [_write_call(call, call_form) for call in message["tool_calls"]]
        if call_form.no_content != "empty" and not content_text(message):
            written.pop("content", None)
            return written if call_form.no_content == "absent" else {**written, "content": None}
    parts = content if isinstance(content, list) else []
    if parts and (form.takes_parts or (form.takes_one_part and len(parts) == 1)):
        return written
    text = content_text(message)
    first = parts[0] if parts else {"type": "text"}
    written["content"] = text if form.takes_text else [{**first, "text": text}]
    return written


def move_reasoning(message: ChatMessage, read: Sequence[str]) -> ChatMessage:
    """A message with its reasoning in a field that a template reads; ``read``: those fields.

    Clients send back what servers have named otherwise than the template does. A message with a
    field that is read, and one for a template that reads none, is returned as it is.
    """
    told = [field for field in REASONING_FIELDS if message.get(field)]
    if not told or not read or {*told}.intersection(read):
        return message
    return {**message, read[0]: message[told[0]]}


def content_text(message: ChatMessage) -> str:
    """The text of a message of :func:`check_messages`: parts are joined by line ends."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _check_content(content: object) -> object:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"content={brief(content)}: has to be a string or a list of text parts")
    return [_check_part(part) for part in content] or ""


def _check_part(part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _TEXT_KINDS:
        what = f"of type {brief(kind)}" if isinstance(kind, str) else brief(part)
        raise ValueError(
            f'a content part {what} is not supported: text only, {{"type": "text", "text": ...}}'
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f'a content part {brief(part)} has no text in "text"')
    return {**_without_nulls(part), "type": "text"}


def _check_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls={brief(calls)}: has to be a list")
    return [_check_call(call) for call in calls]


def _check_call(call: object) -> dict[str, Any]:
    """Check one call. ValueError also for arguments that are a text, but not JSON."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f'tool call {brief(call)}: has to be a dict with a "function"')
    name, arguments = (call["function"].get(key) for key in ("name", "arguments"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'tool call {brief(call)}: its function has no text in "name"')
    if isinstance(arguments, str) and arguments.strip():
        try:
            stated = parse_json(arguments)
        except ValueError as error:
            raise ValueError(f"arguments of a tool call are not JSON: {error}") from error
        if isinstance(stated, str):
            raise ValueError(
                f"arguments of a tool call are the JSON of a text, {brief(arguments)}: give that "
                "of an object"
            )
    return {**_without_nulls(call), "function": _without_nulls(call["function"])}


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the form of a conversation that are null are absent, as those of a message are."""
    return {key: value for key, value in fields.items() if value is not None}


def _write_call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = dict(call["function"])
    arguments: Any = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    is_text = isinstance(arguments, str)
    if form.arguments == "text":
        arguments = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    elif is_text:
        arguments = json.loads(arguments)
    function["arguments"] = arguments
    if form.call == "flat":
        return {**{key: value for key, value in call.items() if key != "function"}, **function}
    return {**call, "function": function}
