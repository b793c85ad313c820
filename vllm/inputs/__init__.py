"""The forms that a prompt may have, and their conversion to one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import (
    Any,
    NamedTuple,
    NotRequired,
    Protocol,
    TypeAlias,
    TypedDict,
    cast,
    runtime_checkable,
)

from vllm.utils.text import brief


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Prompts share prefix-cache entries only when their salts are equal."""


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt`` is only passed on to the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


class EmbedsPrompt(TypedDict):
    """A prompt as the input of the first layer, which replaces looked-up embeddings.

    Engines with ``enable_prompt_embeds`` take it.
    """

    prompt_embeds: Any
    """Tensor [tokens, hidden], float32, bfloat16 or float16, finite."""
    cache_salt: NotRequired[str | None]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Conversation: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Messages for a chat template, or a dict of ``messages`` and optionally ``tools``,
``chat_template_kwargs`` and ``cache_salt``."""
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prompt_embeds")
_CONVERSATION_KEYS = ("messages", "tools", "chat_template_kwargs", "cache_salt")
NO_TOKEN = -1
"""The id of each token that comes as an embedding."""


class ParsedPrompt(NamedTuple):
    """Text, token ids, or both (then the ids are used)."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    embeds: Any = None
    """The embeddings as the caller passed them; they take precedence over text and ids."""


@runtime_checkable
class _Array(Protocol):
    """An array or tensor of any library."""

    def tolist(self) -> Any: ...


@runtime_checkable
class ArrayNumber(Protocol):
    """A number of an array's library, if it has no dimensions."""

    ndim: int

    def item(self) -> Any: ...


def plain_numbers(value: Any) -> Any:
    """Return a number or a list of numpy or torch as Python's; any other value as it is."""
    if isinstance(value, list | tuple):
        return [one.tolist() if isinstance(one, _Array) else one for one in value]
    return value.tolist() if isinstance(value, _Array) else value


def is_token_sequence(value: object) -> bool:
    """Return whether ``value`` is meant as the token ids of one prompt."""
    if isinstance(value, _Array):
        return not _is_column(value)
    return isinstance(value, list | tuple) and bool(value) and not _is_prompt(value[0])


def _is_column(value: object) -> bool:
    """Return whether an array, such as a column of a table, has a prompt in each place."""
    has_places = isinstance(value, ArrayNumber) and value.ndim == 1
    return has_places and _is_prompt(next(iter(cast("Any", value)), None))


def is_conversation(value: object) -> bool:
    """Return whether ``value`` is one conversation, not a prompt and not a list of either."""
    if isinstance(value, Mapping):
        return "messages" in value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and "role" in first


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):  # numpy's has the attributes of its numbers
        return True
    is_token = isinstance(value, ArrayNumber) and value.ndim == 0
    return isinstance(value, Mapping | list | tuple | _Array) and not is_token


def as_prompt_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one prompt or several as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or is_token_sequence(prompts):
        return [prompts]  # type: ignore[list-item]
    several: Any = prompts
    if isinstance(several, Sequence | _Array) and not isinstance(several, bytes | bytearray):
        return list(cast("Any", several))
    raise ValueError(
        f"prompts of type {type(prompts).__name__}: has to be a string, a list of token ids, "
        'a dict with "prompt" or "prompt_token_ids", or a list of these'
    )


def parse_prompt(prompt: PromptType | ParsedPrompt) -> ParsedPrompt:
    """Parse one prompt unless it is parsed already; raises ValueError if it is not a prompt."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return ParsedPrompt(None, _token_ids(prompt))


def as_record(conversation: Any) -> Mapping[str, Any]:
    """Return a conversation as a dict; raises ValueError for a key that nothing reads."""
    if not isinstance(conversation, Mapping):
        return {"messages": conversation}
    _check_keys(conversation, _CONVERSATION_KEYS)
    return conversation


def _check_keys(prompt: Mapping[str, Any], supported: Sequence[str]) -> None:
    unknown = [key for key, value in prompt.items() if key not in supported and value is not None]
    if unknown:
        raise ValueError(
            f"prompt key {brief(unknown[0])} is not supported: the supported keys are "
            + ", ".join(repr(key) for key in supported)
        )


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    _check_keys(prompt, _KEYS)
    text, ids, salt, embeds = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None and embeds is None:
        raise ValueError(
            'a prompt given as a dict needs "prompt", "prompt_token_ids" or "prompt_embeds"'
        )
    if embeds is not None and ids is not None:
        raise ValueError('a prompt has "prompt_token_ids" or "prompt_embeds", not both')
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key!r} of a prompt is {brief(value)}: has to be a string")
    return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt, embeds)


def _token_ids(value: Any) -> list[int]:
    """Return a list, tuple, array or tensor of integers as a list of plain ints."""
    if not isinstance(value, list | tuple) and isinstance(value, _Array):
        try:
            value = value.tolist()
        except Exception as error:  # a tensor without data, for example
            raise ValueError(f"token ids of type {type(value).__name__}: {error}") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"token ids of type {type(value).__name__}: has to be a list of integers")
    if all(type(token) is int for token in value):
        return list(value)
    ids = []
    for position, token in enumerate(value):
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))
        except TypeError:
            raise ValueError(
                f"token id {brief(token)} at position {position} of the prompt is not an integer"
            ) from None
    return ids
