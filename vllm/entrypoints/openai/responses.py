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


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
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


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    """In the first chunk only."""
    token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """In the last chunk of a choice."""


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a completion stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """One token of a chat completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct):
    """A call that the model wants made; ``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One tool call of an answer."""

    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """One tool call of a stream, complete."""

    index: int
    id: str
    type: str = "function"
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


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
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
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


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
    CompletionResponse,
    ChatCompletionResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    DetokenizeResponse,
    RenderedRequest,
)
