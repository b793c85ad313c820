"""Turns conversations into prompts with the model's chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Unpack, cast

from vllm.inputs import TokensPrompt
from vllm.transformers_utils.chat_messages import (
    ChatMessage,
    ContentFormat,
    check_messages,
    content_text,
)
from vllm.transformers_utils.chat_outline import Outline, Piece
from vllm.transformers_utils.chat_rendering import (
    ChatOptions,
    Located,
    Rendering,
    check_content_format,
    check_syntax,
)
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.utils.regular_files import is_regular, open_regular
from vllm.utils.text import brief, check_text, parse_json

_MOST_BYTES = 16 << 20
"""Size of the largest file of a template that is read."""


def load_chat_template(value: str | None) -> str | None:
    """Return the template that a user gave as a file or as text. ValueError: it cannot be used."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ValueError(
            f"chat_template={brief(value)}: has to be a template's text, or the path of a file"
        )
    text = value = os.fspath(value)
    try:
        if is_regular(value):
            text = _template_in(open_regular(value, _MOST_BYTES).read().decode())
        elif "{" not in value:
            raise ValueError(
                "there is no such file, and it is not a template either (a Jinja template holds "
                "'{{' or '{%'); of a tokenizer's named templates give the file"
            )
        check_syntax(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template={brief(value)}: {error}") from None
    return text


def _template_in(text: str) -> str:
    """Return the template in the text of a file: a template, or JSON as checkpoints have it
    (chat_template.json, tokenizer_config.json). ValueError: JSON without one template."""
    try:
        stated = parse_json(text)
    except ValueError:
        return text
    template = stated.get("chat_template") if isinstance(stated, Mapping) else None
    if not isinstance(template, str):
        raise ValueError("the file is JSON whose chat_template is no text; give a Jinja file")
    return template


def as_conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[list[ChatMessage]]:
    """Return a list of conversations from one conversation or several."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={brief(messages)}: has to be a list of at least one message")
    if isinstance(messages[0], Mapping):
        return [cast(list[ChatMessage], list(messages))]
    return [cast(list[ChatMessage], conversation) for conversation in messages]


def chat_text(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> str:
    """Return the text of one conversation, with the special tokens that the template writes.

    Messages reach the template in the forms that it reads (docs/extraction.md). ValueError: it
    cannot render the messages, or would leave out what one of them says.
    """
    rendering, checked = Rendering(tokenizer, **options), check_messages(messages)
    text = rendering.render(checked).text
    check_kept(rendering, checked, text)
    return text


def unread_fields(tokenizer: TokenizerLike, **options: Unpack[ChatOptions]) -> list[str]:
    """Return the fields that have no effect on a rendering, because the template does not read
    them: ``tools``, ``chat_template_kwargs.NAME``. ValueError: the options are wrong."""
    return Rendering(tokenizer, **options).unread


def render_chat(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> TokensPrompt:
    """Return the prompt of one conversation: its :func:`chat_text` and the token ids of that.

    The template writes the special tokens, so none are added.
    """
    text = chat_text(tokenizer, messages, **options)
    check_text("the text of the messages", text)
    token_ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return {"prompt_token_ids": token_ids, "prompt": text}


def check_kept(rendering: Rendering, messages: list[ChatMessage], text: str) -> Located | None:
    """Check that ``text``, a rendering of ``messages``, has all that they say.

    Returns the places of their texts, or None if they are not certain. ValueError names the
    message and what is left out. Reasoning may be left out, since templates mean to do so.
    """
    marked = rendering.mark(messages)
    located = rendering.locate(marked, text)
    written = set() if located is None else set(located.outline.numbers)
    doubtful = {
        piece.message
        for number, piece in enumerate(marked.pieces)
        if piece.kind != "aside" and piece.text and number not in written
    }
    for position in sorted(doubtful):
        _check_message(rendering, messages, position, text)
    return located


def _check_message(
    rendering: Rendering, messages: list[ChatMessage], position: int, text: str
) -> None:
    """Render markers in one message alone, and check that they come out."""
    marked = rendering.mark(messages, position)
    outline = rendering.outline(marked.messages)
    for number, piece in enumerate(marked.pieces):
        if piece.kind == "aside" or not piece.text:
            continue
        if not _is_kept(number, marked.pieces, outline, text):
            lost = _describe(rendering, messages[position], piece)
            raise ValueError(
                f"message {position}: the chat template leaves out {lost}, or give a template that "
                "writes it (chat_template=, --chat-template)"
            )


def _is_kept(number: int, pieces: list[Piece], outline: Outline | None, text: str) -> bool:
    said = pieces[number].text
    if outline is None:  # the template refuses the marker: only the text itself can be looked for
        return said in text
    if number in outline.numbers and outline.has_anything_in_place(text):
        return True
    others = {*outline.numbers}.intersection(range(len(pieces))) - {number}
    elsewhere = (*outline.literals, *(pieces[n].text for n in others if pieces[n].kind != "aside"))
    return text.count(said) > sum(one.count(said) for one in elsewhere)


def _describe(rendering: Rendering, message: ChatMessage, piece: Piece) -> str:
    """Return what is left out, and what would work."""
    role, calls = message["role"], message.get("tool_calls", ())
    if piece.text == str(message.get("refusal", "")).strip():
        return "the refusal: write it as the content"
    if piece.kind == "call":
        if not calls:
            return "function_call: give tool_calls (and the result in a message of role 'tool')"
        if piece.part:
            return f"tool call {piece.part + 1} of {len(calls)}: give each call a message"
        if content_text(message).strip():
            return "tool calls beside a text: leave the text out"
        return "tool calls: write them into the text"
    if calls:
        return "a text beside tool calls: leave the text out"
    form = rendering.forms.content_form(role)
    if form is not None and not any(form):
        return f"the text of messages of role {role!r}: use a role that it knows"
    return (
        f"the text of this message of role {role!r} where it stands: move it (some templates take "
        "a system message only first, and before a question)"
    )


__all__ = [
    "ChatMessage",
    "ChatOptions",
    "ContentFormat",
    "as_conversations",
    "chat_text",
    "check_content_format",
    "check_kept",
    "check_messages",
    "load_chat_template",
    "render_chat",
    "unread_fields",
]
