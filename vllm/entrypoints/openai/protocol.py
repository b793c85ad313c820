"""Bodies of requests. Unknown fields are accepted; ``null`` means the default.

Where a field takes several forms, the form is told from the value, so that errors name
the place that is wrong and not every form it might have had. Names of forms stand in
angle brackets: they are no part of a path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Required, TypedDict

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Strict(), Field(ge=0)]


def _prompt_form(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<token lists>" if isinstance(first, list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TokenId], Tag("<tokens>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[list[TokenId]], Tag("<token lists>")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_form",
        custom_error_message=("Input should be a string, a list of token ids, or a list of either"),
    ),
]


def _content_form(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Any], Tag("<parts>")],
    Discriminator(
        _content_form,
        custom_error_type="content_form",
        custom_error_message="Input should be a string or a list of content parts",
    ),
]


class Message(TypedDict, total=False):
    """One message of a conversation. The chat template gets every other field as well."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    content: Content | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None


def _need_content(message: Message) -> Message:
    if message.get("content", "") is None and message["role"] != "assistant":
        raise PydanticCustomError(
            "content_null", "content may be null only in messages of the assistant"
        )
    return message


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """One of the names served; may be left out."""


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """A last chunk with the counts of tokens."""
    continuous_usage_stats: bool | None = None
    """Counts of tokens in every chunk."""


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    n: int | None = Field(default=None, le=1024)
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int64 | None = None
    response_format: dict[str, Any] | None = None
    """Only ``{"type": "text"}``."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Token ids of prompt and output beside the text."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens in ``logprobs`` read ``token_id:<id>``."""

    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    """Keep so many tokens of the prompt; -1: as many as leave room for the output."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut off; the left one unless said otherwise."""
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """For the KV connector, such as ``{"include_output_tokens": true}``."""


class CompletionRequest(GenerationBody):
    """Body of /v1/completions."""

    prompt: Prompt | None = None
    echo: bool | None = None
    """The text begins with the prompt."""
    suffix: str | None = None
    """Not supported."""
    logprobs: Int64 | None = None
    """Most likely tokens to report at each position, beside the chosen one."""


class ChatFields(BaseModel):
    """How a conversation becomes a prompt."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """The prompt ends where the assistant begins to speak; true unless said otherwise."""
    continue_final_message: bool | None = None
    """The prompt ends inside the last message."""
    chat_template: str | None = None
    """Not accepted: the server's template counts."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


Messages = list[Annotated[Message, AfterValidator(_need_content)]]


class ChatCompletionRequest(ChatFields, GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Int64 | None = None
    """Wins over ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tool_choice: str | dict[str, Any] | None = None
    """"auto" (the default) or "none"."""


class TokenizeRequest(ChatFields, Body):
    """Body of /tokenize: a text, or a conversation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )

    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    tokens: list[TokenId]


REQUEST_MODELS: tuple[type[Body], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)

__all__ = [
    "REQUEST_MODELS",
    "Body",
    "ChatCompletionRequest",
    "ChatFields",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationBody",
    "StreamOptions",
    "TokenizeRequest",
]
