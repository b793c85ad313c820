"""vLLM's module name for :mod:`vllm.transformers_utils.chat_template`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.transformers_utils.chat_template import *  # noqa: F403

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.transformers_utils.tokenizer import TokenizerLike


def resolve_hf_chat_template(
    tokenizer: TokenizerLike,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: ModelConfig | None = None,
) -> str | None:
    """Return the template that transformers would take: the given one (or the one of that name),
    or the tokenizer's, for tools if there are any; None if there is none. lm-eval asks for it."""
    if not tokenizer.chat_template:
        return chat_template
    return str(tokenizer.get_chat_template(chat_template, tools))
