"""Bodies of answers. Every field is in the JSON, with null for unknown values; fields of type
:data:`WhenKnown` are left out instead."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

T = TypeVar("T")
WhenKnown = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
TransferParams = dict[str, Any]
"""The KV connector's report on a continuation, such as the path of its file."""


class Described(BaseModel):
    """A model whose fields are described by the docstrings below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class PromptTokensDetails(Described):
    """Parts of the prompt tokens."""

    cached_tokens: int
    """Tokens that were found in the prefix cache, or loaded."""


class Usage(Described):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: None = None

    @classmethod
    def of(
        cls, num_prompt_tokens: int, num_completion_tokens: int, num_cached: int | None = None
    ) -> Usage:
        """Make the usage of these counts, with their sum; ``num_cached`` None: it is not told."""
        return cls(
            prompt_tokens=num_prompt_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            completion_tokens=num_completion_tokens,
            prompt_tokens_details=(
                None if num_cached is None else PromptTokensDetails(cached_tokens=num_cached)
            ),
        )


class PromptLogprob(TypedDict):
    """Log-probability of one token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, by token id; the first is null."""


class TensorBody(Described):
    """A tensor in JSON."""

    data: str
    """Base64 of its elements, little-endian, in the order of rows."""
    shape: list[int]
    dtype: str


class HiddenStatesBody(Described):
    """Rows of a choice's tokens, or the file that has them."""

    layers: list[int | str]
    """Layer ids, in the order of the columns."""
    positions: list[int]
    """Positions of the rows' tokens, counted over prompt and output."""
    num_prompt_tokens: int
    """Tokens of the prompt; the others were generated."""
    tensors: WhenKnown[dict[str, TensorBody]] = None
    """[rows, ...] each: ``hidden_states`` [rows, layers, hidden], and what else was requested."""
    constants: WhenKnown[dict[str, list[int]]] = None
    """Values that are the same for all tokens, such as ``expert_layers``."""
    hidden_states_path: WhenKnown[str] = None
    """Path of the file on the server's machine."""
    hidden_states_url: WhenKnown[str] = None
    """Address of the file, if the server lets clients download files."""


class LensTensor(TensorBody):
    """A tensor in JSON as vllm-lens reads it; ``dtype`` is numpy's for the same bits."""

    original_dtype: str


class SteeringVectorCard(Described):
    """Steering vectors that the server keeps."""

    id: str
    """Name by which requests refer to them."""
    object: str = "steering_vector"
    created: int
    layers: list[int]
    """Layer ids at which they are added."""
    width: int
    """Elements of each vector."""
    bytes: int


class SteeringVectorList(Described):
    """All steering vectors that the server keeps."""

    object: str = "list"
    data: list[SteeringVectorCard]


class Choice(Described):
    """Fields of every choice."""

    index: int
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    hidden_states: WhenKnown[HiddenStatesBody] = None
    """The rows that the request asked for."""


class Answer(Described):
    """Fields of every answer, and of every event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    warnings: WhenKnown[list[str]] = None
    """Fields of the request that had no effect; in a stream only its first event has them."""


class Reply(Answer):
    """A whole answer."""

    service_tier: None = None
    system_fingerprint: str
    usage: Usage
    activations: WhenKnown[dict[str, LensTensor]] = None
    """``residual_stream`` [layers, tokens, hidden], for ``output_residual_stream`` of vllm-lens."""


class Chunk(Answer):
    """One event of a stream; the last ones also have the fields that are known only then."""

    usage: WhenKnown[Usage] = None
    system_fingerprint: WhenKnown[str] = None
    kv_transfer_params: WhenKnown[TransferParams] = None
    """The ``kv_transfer_params`` of the first choice."""


class CompletionLogprobs(Described):
    """Log-probabilities of a completion, with a list entry for each token."""

    text_offset: list[int] = []
    """Characters of the text before the token; of a part of a character, before the character."""
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(Choice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobsBody | None
    prompt_token_ids: list[int] | None
    routed_experts: None = None
    kv_transfer_params: TransferParams | None


class CompletionResponse(Reply):
    """Answer of /v1/completions."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
    kv_transfer_params: TransferParams | None
    """The ``kv_transfer_params`` of the first choice."""
    ec_transfer_params: None = None
    metrics: None = None


class CompletionChunkChoice(Choice):
    """The new part of one completion."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None
    """Present in the first chunk only."""
    kv_transfer_params: WhenKnown[TransferParams] = None
    """Present in the last chunk of a choice."""


class CompletionChunk(Chunk):
    """One event of a completion stream."""

    object: str = "text_completion"
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class TopLogprob(Described):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 of the token, which may be a part of a character; null: not known."""


class TokenLogprob(TopLogprob):
    """One token of a chat completion."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Described):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]


class FunctionCall(Described):
    """A call that the model requests; ``arguments`` is JSON, which a stream sends in pieces."""

    name: WhenKnown[str] = None
    arguments: str


class ToolCall(Described):
    """One tool call of an answer, or in a stream a piece of one; the first piece has the id."""

    index: WhenKnown[int] = None
    id: WhenKnown[str] = None
    type: WhenKnown[str] = None
    function: FunctionCall


class AnswerMessage(Described):
    """The message of the assistant."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    tool_calls: WhenKnown[list[ToolCall]] = None


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None
    routed_experts: None = None
    kv_transfer_params: TransferParams | None


class ChatCompletionResponse(Reply):
    """Answer of /v1/chat/completions."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobsBody | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: TransferParams | None
    """The ``kv_transfer_params`` of the first choice."""
    ec_transfer_params: None = None
    metrics: None = None


class Delta(Described):
    """The new part of an assistant's message."""

    role: WhenKnown[str] = None
    content: WhenKnown[str] = None
    tool_calls: WhenKnown[list[ToolCall]] = None


class ChatChunkChoice(Choice):
    """The new part of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class LastChatChunkChoice(ChatChunkChoice):
    """The last part of an answer."""

    stop_reason: int | str | None = None
    kv_transfer_params: WhenKnown[TransferParams] = None


class ChatChunk(Chunk):
    """One event of a chat stream."""

    object: str = "chat.completion.chunk"
    choices: list[LastChatChunkChoice | ChatChunkChoice]
    prompt_token_ids: WhenKnown[list[int]] = None


class PooledItem(Described):
    """The result of one input."""

    index: int
    object: str


class Embedding(PooledItem):
    """The vector of one input."""

    object: str = "embedding"
    embedding: list[float] | str


class Pooled(PooledItem):
    """The numbers of one input, or a list of them for each of its tokens."""

    object: str = "pooling"
    data: list[float] | list[list[float]] | str


class Classes(Described):
    """The classes of one input."""

    index: int
    label: str | None
    """The most probable one."""
    probs: list[float]
    num_classes: int


class PooledAnswer(Described):
    """Fields of every answer of vectors or classes."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Any]
    usage: Usage
    warnings: WhenKnown[list[str]] = None
    """Fields of the request that had no effect."""


class EmbeddingResponse(PooledAnswer):
    """Answer of /v1/embeddings."""

    data: list[Embedding]


class PoolingResponse(PooledAnswer):
    """Answer of /pooling."""

    data: list[Pooled]


class ClassificationResponse(PooledAnswer):
    """Answer of /classify."""

    data: list[Classes]


class ModelPermission(Described):
    """The permissions of a model in the OpenAI API."""

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


class ModelCard(Described):
    """One name under which the model is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm"
    root: str
    parent: str | None = None
    """The model that an adapter changes."""
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Described):
    """Answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(Described):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Described):
    """Answer of /detokenize."""

    prompt: str


class RenderedRequest(Described):
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
    kv_transfer_params: TransferParams | None
    ec_transfer_params: None = None
