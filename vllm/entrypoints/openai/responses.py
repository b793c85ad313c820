"""Bodies of answers. Every field is in the JSON, as null where nothing is known."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


def json_response(content: msgspec.Struct | list[Any]) -> Response:
    """``content`` as a JSON answer."""
    return Response(encode(content), media_type="application/json")


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, a list entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """Of one token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, by token id; the first is null."""


class Choice(msgspec.Struct, kw_only=True):
    """What every choice of an answer says."""

    index: int
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class CompletionChoice(Choice, kw_only=True):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobsBody | None
    prompt_token_ids: list[int] | None
    routed_experts: None = None
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector says of this choice, such as the path of its file."""


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None
    """Those of the first choice."""
    ec_transfer_params: None = None
    metrics: None = None


class CompletionChunkChoice(Choice, kw_only=True):
    """What is new of one completion."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    """In the first chunk only."""
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """In the last chunk of a choice."""


class Chunk(msgspec.Struct, kw_only=True):
    """What every event of a stream says; in the last ones also what is known by then."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CompletionChunk(Chunk, kw_only=True):
    """One event of a completion stream."""

    object: str = "text_completion"
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of a chat completion."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call that the model wants made; ``arguments`` is JSON, of which a stream sends pieces."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One tool call of an answer; in a stream what is new of it, the first piece with its id."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the assistant says."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None
    routed_experts: None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: PromptLogprobsBody | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None = None
    metrics: None = None


class Delta(msgspec.Struct, kw_only=True):
    """What is new of an answer; fields that are not new are absent."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    """What is new of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    """One event of a chat stream."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelPermission(msgspec.Struct, kw_only=True):
    """What the OpenAI API says of a model's use."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One name under which the model is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A request as the engine would get it."""

    request_id: str
    token_ids: list[int]
    token_offsets: None = None
    features: None = None
    content_parts: None = None
    sampling_params: dict[str, Any]
    model: str
    reasoning_ended: None = None
    reasoning_parser_kwargs: None = None
    return_token_ids: bool | None
    output_mode: str = "tokens"
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None = None


RESPONSE_TYPES: tuple[type[msgspec.Struct], ...] = (
    *(CompletionResponse, CompletionChunk, ChatCompletionResponse, ChatChunk, RenderedRequest),
    *(ModelCard, ModelList, TokenizeResponse, DetokenizeResponse),
)
