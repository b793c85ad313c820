"""Conversations -> prompts, through the model's chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Unpack, cast

from vllm.inputs import TokensPrompt
from vllm.transformers_utils.chat_losses import check_kept
from vllm.transformers_utils.chat_messages import ChatMessage, check_messages
from vllm.transformers_utils.chat_rendering import (
    ChatOptions,
    ContentFormat,
    Rendering,
    check_content_format,
)
from vllm.transformers_utils.tokenizer import TokenizerLike


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


def chat_text(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> str:
    """The text of one conversation, with the special tokens that the template writes.

    Messages reach the template in the forms that it reads (docs/extraction.md). ValueError: it
    cannot render the messages, or would leave out what one of them says.
    """
    rendering, checked = Rendering(tokenizer, **options), check_messages(messages)
    text = rendering.render(checked).text
    check_kept(rendering, checked, text)
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
    "as_conversations",
    "chat_text",
    "check_content_format",
    "check_messages",
    "load_chat_template",
    "render_chat",
]
