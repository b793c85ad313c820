"""The place where vLLM has :mod:`vllm.transformers_utils.chat_template`."""

from vllm.transformers_utils.chat_template import (
    ChatMessage,
    ContentFormat,
    ResolvedContentFormat,
    as_conversations,
    load_chat_template,
    parse_messages,
    render_chat,
    resolve_content_format,
)

__all__ = [
    "ChatMessage",
    "ContentFormat",
    "ResolvedContentFormat",
    "as_conversations",
    "load_chat_template",
    "parse_messages",
    "render_chat",
    "resolve_content_format",
]
