"""Bodies of requests, and their reader. Unknown fields have no effect, of which the reply warns;
``null`` means the default.

If a field takes several forms, the value decides the form, so errors name the place that is
wrong and not every possible form. Names of forms are in angle brackets, because they are not
part of a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Required, Self

from fastapi import Depends, Request
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Strict,
    Tag,
    ValidationError,
)
from typing_extensions import TypedDict

from vllm.entrypoints.openai.errors import ApiError, bad_form
from vllm.entrypoints.openai.responses import Described
from vllm.hidden_states.names import MOST_LOGPROBS, Pooling
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_NAMES_LOGGED = 200
"""Most names of unknown fields in the log of a server, because clients choose them."""
MAX_ERRORS_TOLD = 20
MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MAX_HOOKS = 1024
MAX_STEERING = 1024
_LABELS = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "metadata", "store", "service_tier"}
)
"""Fields of OpenAI's API that change no answer."""
_names_logged: set[str] = set()


def documented(**limits: float) -> Any:
    """Make a field with default null, and limits for the schema; SamplingParams checks them."""
    return Field(default=None, json_schema_extra=dict(limits))


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Strict(), Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Token ids; an error names only the first wrong id, because there may be millions."""
Texts = Annotated[list[str], Field(fail_fast=True)]


def _form(value: object) -> str | None:
    """Return the name of a value's form; the first item decides the form of a list."""
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, dict):
        return "<object>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return (
        "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<list>"
    )


def _list_form(value: object) -> str | None:
    return "<list>" if isinstance(value, list) else _form(value)


def _one_of(form: Any, expected: str) -> Any:
    """Choose the form of a value by ``form``; an error for other values names ``expected``."""
    return Discriminator(
        form, custom_error_type="form", custom_error_message=f"Input should be {expected}"
    )


_Text = Annotated[str, Tag("<text>")]
Prompt = Annotated[
    _Text
    | Annotated[TokenIds, Tag("<list>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<lists>")],
    _one_of(_form, "a string, a list of token ids, or a list of either"),
]
Content = Annotated[
    _Text | Annotated[list[Any], Tag("<list>")],
    _one_of(_list_form, "a string or a list of content parts"),
]
Stop = Annotated[
    _Text | Annotated[Texts, Tag("<list>")], _one_of(_list_form, "a string or a list of strings")
]
ToolChoice = Annotated[
    _Text | Annotated[dict[str, Any], Tag("<object>")], _one_of(_form, "a string or an object")
]


def _layer_form(value: object) -> str | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return "<number>" if is_number else _list_form(value)


_Id = Annotated[int, Strict(), Tag("<number>")]
LayersField = Annotated[
    _Text
    | _Id
    | Annotated[
        list[Annotated[_Text | _Id, _one_of(_layer_form, "a layer id or a name of layers")]],
        Field(fail_fast=True),
        Tag("<list>"),
    ],
    _one_of(_layer_form, "a layer id, a name of layers, or a list of them"),
]
PositionsField = Annotated[
    _Text | Annotated[list[Annotated[Int64, Strict()]], Field(fail_fast=True), Tag("<list>")],
    _one_of(_list_form, "all, last, mask, every:K, generated, or a list of positions"),
]


SteeringLayers = Annotated[
    _Id | Annotated[list[Annotated[Int64, Strict()]], Field(fail_fast=True), Tag("<list>")],
    _one_of(_layer_form, "a layer id, or a list of them"),
]
SteeringPositions = Annotated[
    _Text | Annotated[list[Annotated[Int64, Strict()]], Field(fail_fast=True), Tag("<list>")],
    _one_of(_list_form, "all, prompt, generated, or a list of positions"),
]
MaskField = Annotated[
    _Text
    | Annotated[list[Annotated[int, Field(ge=0, le=1)]], Field(fail_fast=True), Tag("<list>")],
    _one_of(_list_form, "a list of booleans, or a rule for conversations"),
]


class HiddenStatesRequest(Described):
    """The rows that a request asks for; the names are those of ``LLM.extract``."""

    model_config = ConfigDict(extra="forbid")

    layers: LayersField | None = None
    """Layers such as ``[2, 12, -1]``, ``"0:24:4,last"`` or ``"norm"``."""
    positions: PositionsField | None = None
    """Tokens whose rows are wanted: ``"all"`` (default), ``"last"``, ``"every:K"``, ``"mask"``,
    ``"generated"``, or a list of positions in prompt and output."""
    mask: MaskField | None = None
    """A boolean for each token of the prompt, for ``positions="mask"``; for a conversation also a
    rule, such as ``"answers"`` or ``"last-answer,before"``. The rows have it as ``loss_mask``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] | None = None
    """Dtype of the rows; the model's by default. ``"fp8"``: with a scale for each row and layer."""
    pooling: Pooling | None = None
    """Reduce the rows to one: their ``"mean"``, or the ``"last"`` of them."""
    top_logprobs: Annotated[int, Strict(), Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Keep so many most likely next tokens with each row, with their log-probabilities."""
    logprob_temperature: Annotated[float, Strict(), Field(ge=1e-4, le=1e4)] | None = None
    """Divides the logits before the softmax of ``top_logprobs``."""
    hooks: Annotated[Texts, Field(max_length=MAX_HOOKS)] | None = None
    """Names of hook points, whose values are kept as tensors of these names."""
    delivery: Literal["auto", "inline", "file", "safetensors"] | None = None
    """``"inline"``: base64 in the reply. ``"file"``: a file in the server's storage folder.
    ``"safetensors"``: the body of the reply is a safetensors file. ``"auto"`` (default): inline, or
    a file if that is too large and the server has a storage folder."""


class TensorField(Described):
    """A tensor of floats in JSON."""

    model_config = ConfigDict(extra="forbid")

    data: str
    """Base64 of its elements, little-endian, in the order of rows."""
    shape: Annotated[list[Annotated[Int64, Strict(), Field(ge=0)]], Field(max_length=3)]
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class SteeringRequest(Described):
    """Vectors to add to the stream: inline, or by name; fields are those of ``SteeringVector``."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    """Name of vectors that the server has, instead of ``vectors`` and ``layers``."""
    vectors: TensorField | None = None
    """[hidden], [layers, hidden] or [layers, positions, hidden]."""
    layers: SteeringLayers | None = None
    """Layer ids: i is the stream after i decoder layers."""
    scale: float | None = None
    """Factor of the vectors; 1 by default."""
    positions: SteeringPositions | None = None
    """Tokens to steer: ``"all"`` (default), ``"prompt"``, ``"generated"``, or a list."""
    norm_match: bool | None = None
    """Scale the vectors to the norm of the stream at each token, then by ``scale``."""


SteeringField = Annotated[
    _Text
    | Annotated[SteeringRequest, Tag("<object>")]
    | Annotated[
        list[
            Annotated[
                _Text | Annotated[SteeringRequest, Tag("<object>")],
                _one_of(_form, "an object, or a name of vectors"),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_STEERING),
        Tag("<list>"),
    ],
    _one_of(_list_form, "an object, a name of vectors, or a list of them"),
]


LensOption = str | Annotated[bool, Strict()] | list[Any]
"""An option of vllm-lens, which its client sends as JSON in a text."""


class ExtraArguments(Described):
    """``vllm_xargs``: arguments for extensions."""

    model_config = ConfigDict(extra="allow")

    hidden_states: HiddenStatesRequest | None = None
    """The same as the field ``hidden_states`` of the body."""
    steering: SteeringField | None = None
    """The same as the field ``steering`` of the body."""
    output_residual_stream: LensOption | None = None
    """Layers as vllm-lens counts them, or true for all; the reply has rows in ``activations``."""
    apply_steering_vectors: LensOption | None = None
    """Steering vectors in the form of vllm-lens."""
    apply_hooks: LensOption | None = None
    """An option of vllm-lens that is refused."""
    output_qk: LensOption | None = None
    """An option of vllm-lens that is refused."""


class Message(TypedDict, total=False):
    """One message of a conversation. The chat template also gets all other fields."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    content: Content | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None


def told_of_unknown(names: list[str], is_strict: bool) -> list[str]:
    """Return texts about fields that are not known, and log each name once. Raises ApiError with
    ``is_strict`` if there are any."""
    if names and is_strict:
        problem = "not known; leave it out (the server was started with --strict-requests)"
        raise bad_form(*((f"body.{name:.100}", problem) for name in names[:MAX_ERRORS_TOLD]))
    for name in names:
        if name not in _names_logged and len(_names_logged) < MAX_NAMES_LOGGED:
            _names_logged.add(name)
            logger.warning("The request field %.100r is not known and has no effect", name)
    return [
        f"the field {name[:100]!r} is not known and has no effect"
        for name in names[:MAX_ERRORS_TOLD]
    ]


def _unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the names of the fields that are set and not known, also those of objects in it."""
    for name, value in (body.__pydantic_extra__ or {}).items():
        if value is not None and prefix + name not in _LABELS:
            yield prefix + name
    for name, value in body:
        if isinstance(value, BaseModel):
            yield from _unknown_fields(value, f"{prefix}{name}.")


class Body(Described):
    """A request's body."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """One of the served names; it may be left out."""
    _warnings: list[str] = PrivateAttr(default_factory=list)
    """Texts about fields without effect, for the reply."""

    @classmethod
    async def read(cls, request: Request) -> Self:
        """Read a request's body; raises ApiError ("Bad Request") if it does not have this form."""
        content, content_type = await request.body(), request.headers.get("content-type", "")
        if not content:
            upgrade = request.headers.get("upgrade")
            lost = (
                f"not read, because the request asks to upgrade to {upgrade!r}: send plain HTTP/1.1"
            )
            raise bad_form(("body", lost if upgrade else "Field required"))
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise bad_form((None, f"Content-Encoding is {encoding!r}: send the body as it is"))
        media_type = content_type.partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise bad_form((None, f"Content-Type is {content_type!r}: has to be application/json"))
        try:
            body = cls.model_validate_json(content)
        except ValidationError as error:
            raise form_error(error, content) from None
        names = list(_unknown_fields(body))
        body._warnings = told_of_unknown(names, request.app.state.server.settings.strict_requests)
        return body


class StreamOptions(Described):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool | None = None
    """Send token counts in every chunk."""


class PromptFields(Body):
    """Fields about the prompts, which all requests that run the model share."""

    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    """Keep this many tokens of the prompt; -1: as many as leave room for the output."""
    truncation_side: Literal["left", "right"] | None = None
    """The side of the prompt that is cut off. Default: left to generate, right to pool."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as begin-of-text; by default to texts only."""
    cache_salt: str | None = None
    """Prompts share cached prefixes only if their salts are equal."""
    request_id: str | None = None
    """Name of the request in logs and files; a random one by default."""


class GenerationBody(PromptFields):
    """Fields that completions and chat completions share."""

    n: int | None = Field(default=None, le=1024, json_schema_extra={"minimum": 1})
    """Number of answers for each prompt; 1 by default."""
    max_tokens: Int64 | None = documented(minimum=1)
    """Most tokens to generate; at least 1. Default: 16 for completions, the rest of the context
    for chat."""
    min_tokens: Int64 | None = documented(minimum=0)
    """Number of tokens before which the answer does not stop."""
    temperature: float | None = documented(minimum=0, maximum=2)
    """0: always the most likely token; higher values give more random ones. Default: the
    checkpoint's, else 1."""
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: Int64 | None = documented(minimum=-1)
    """Sample from this many most likely tokens; 0 and -1: from all."""
    min_p: float | None = documented(minimum=0, maximum=1)
    """Sample from tokens at least this probable, relative to the most likely one."""
    presence_penalty: float | None = documented(minimum=-2, maximum=2)
    """Lower the logits of tokens that the answer has already."""
    frequency_penalty: float | None = documented(minimum=-2, maximum=2)
    """Lower the logits of tokens by their count in the answer."""
    repetition_penalty: float | None = documented(exclusiveMinimum=0)
    """Divide the logits of tokens in prompt and answer; 1: no change."""
    seed: Int64 | None = None
    """Seed of the sampling; the same seed gives the same answer."""
    stop: Stop | None = None
    """Text, or texts, at which the answer ends; also special tokens, which texts lack."""
    stop_token_ids: TokenIds | None = None
    """Token ids at which the answer ends."""
    ignore_eos: bool | None = None
    """Do not end at the model's end-of-text token."""
    include_stop_str_in_output: bool | None = None
    """Keep the text of ``stop`` at the end of the answer."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; true by default."""
    spaces_between_special_tokens: bool | None = None
    """Write spaces between special tokens; true by default."""
    logit_bias: dict[str, float] | None = None
    """Token id -> number added to its logit."""
    allowed_token_ids: TokenIds | None = None
    """Token ids from which answers are made; all by default."""
    bad_words: Texts | None = None
    """Texts that answers do not contain."""
    prompt_logprobs: Int64 | None = documented(minimum=0)
    """Number of most likely tokens to report at each position of the prompt."""
    response_format: dict[str, Any] | None = None
    """Only ``{"type": "text"}`` is supported."""

    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and output with the text."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in ``logprobs`` as ``token_id:<id>``."""

    priority: Int64 | None = None
    """Lower numbers go first; others than 0 need ``--scheduling-policy priority``."""
    hidden_states: HiddenStatesRequest | None = None
    """Return rows of the tokens of prompt and output; no connector is needed. ``max_tokens``
    is then 0 by default, which generates nothing."""
    steering: SteeringField | None = None
    """Vectors to add to the stream of the request's tokens: objects, or names of vectors."""
    vllm_xargs: ExtraArguments | None = None
    """Arguments for extensions: ``hidden_states`` and ``steering``, as above."""
    kv_transfer_params: dict[str, Any] | None = None
    """Options for the KV connector, such as ``{"include_output_tokens": true}``."""


class CompletionRequest(GenerationBody):
    """Body of /v1/completions."""

    prompt: Prompt | None = None
    """A text, a list of token ids, or a list of either: one answer, or ``n``, for each."""
    prompt_embeds: Stop | None = None
    """Instead of ``prompt``: a tensor [tokens, hidden] as ``torch.save`` writes it, in base64, or
    several; the server must have been started with ``--enable-prompt-embeds``."""
    echo: bool | None = None
    """Begin the text with the prompt; token ids, and a text that was cut off, as they read."""
    suffix: str | None = None
    """Not supported."""
    logprobs: Int64 | None = documented(minimum=0)
    """Number of most likely tokens to report at each position, in addition to the chosen one."""


class ChatFields(Described):
    """Options for making a prompt of a conversation."""

    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """Descriptions of functions that the model may call, in OpenAI's form."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an assistant message; true by default."""
    continue_final_message: bool | None = None
    """End the prompt inside the last message."""
    chat_template: str | None = None
    """Not accepted: the server's template is always used."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    documents: list[dict[str, Any]] | None = None
    """The variable of this name: texts to answer from, for templates that read them."""
    reasoning_effort: str | None = None
    """The variable of this name, such as ``"low"``."""


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(ChatFields, GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Messages
    """The conversation, the oldest message first."""
    max_completion_tokens: Int64 | None = documented(minimum=1)
    """Most tokens to generate; takes precedence over ``max_tokens``."""
    logprobs: bool | None = None
    """Report the log-probability of each chosen token."""
    top_logprobs: Int64 | None = documented(minimum=0)
    """Number of most likely tokens to report at each position, with ``logprobs``."""
    tool_choice: ToolChoice | None = None
    """"auto" (the default) or "none"."""
    parallel_tool_calls: bool | None = None
    """False: the answer has at most one tool call, the first that the model writes."""


class SteeringVectorsRequest(Body):
    """Body of POST /v1/steering_vectors."""

    name: str
    """Name by which requests refer to the vectors; a name that exists gets the new ones."""
    vectors: TensorField
    """[hidden] for one layer, or [layers, hidden]."""
    layers: SteeringLayers
    """Layer ids: i is the stream after i decoder layers."""


class UnloadLoRARequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str
    """Name of the adapter."""
    lora_int_id: Int64 | None = None
    """Accepted for existing clients, without effect: the name tells the adapter."""


class LoadLoRARequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    """Name by which requests refer to the adapter, as their model."""
    lora_path: str
    """Folder on the server's machine."""


class PooledBody(ChatFields, PromptFields):
    """Fields that requests for vectors and for classes share."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["input"]}, {"required": ["messages"]}]},
    )

    input: Prompt | None = None
    """A text, a list of token ids, or a list of either: one result for each."""
    messages: Messages | None = None
    """A conversation, instead of ``input``."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an assistant message; false by default."""


class ClassificationRequest(PooledBody):
    """Body of /classify."""

    use_activation: bool | None = None
    """False: raw scores instead of probabilities."""


class EmbeddingRequest(PooledBody):
    """Body of /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    """``base64``: the float32 numbers in little-endian order, as one text."""
    dimensions: Int64 | None = documented(minimum=1)
    """Length of the vectors, if the model was trained for shorter ones."""
    pooling: Literal["last", "mean"] | None = None
    """The state of the last token, or the mean of all; by default what the checkpoint says."""
    normalize: bool | None = None
    """Give vectors the length 1; by default what the checkpoint says, else true."""


class PoolingRequest(EmbeddingRequest, ClassificationRequest):
    """Body of /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """A vector (the default) or scores of each input, or of each token."""


class TokenizeRequest(ChatFields, Body):
    """Body of /tokenize: a text, or a conversation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )

    prompt: str | None = None
    """A text, instead of ``messages``."""
    messages: Messages | None = None
    """A conversation, instead of ``prompt``."""
    return_token_strs: bool | None = None
    """Return each token as the vocabulary spells it, too."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; by default to texts only."""


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    tokens: TokenIds
    """Token ids; those without a token give no text."""


CompletionBody = Annotated[CompletionRequest, Depends(CompletionRequest.read)]
ChatBody = Annotated[ChatCompletionRequest, Depends(ChatCompletionRequest.read)]
EmbeddingBody = Annotated[EmbeddingRequest, Depends(EmbeddingRequest.read)]
PoolingBody = Annotated[PoolingRequest, Depends(PoolingRequest.read)]
ClassificationBody = Annotated[ClassificationRequest, Depends(ClassificationRequest.read)]
SteeringVectorsBody = Annotated[SteeringVectorsRequest, Depends(SteeringVectorsRequest.read)]
TokenizeBody = Annotated[TokenizeRequest, Depends(TokenizeRequest.read)]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(DetokenizeRequest.read)]


def form_error(error: ValidationError, content: bytes = b"") -> ApiError:
    """Return the error for a body of a wrong form."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return _json_error(found[0]["msg"], content)
    return bad_form(*((_path(item["loc"]), item["msg"]) for item in found[:MAX_ERRORS_TOLD]))


def _path(location: tuple[int | str, ...]) -> str:
    """Return a path such as ``body.prompt.1``, without the names of forms in angle brackets."""
    steps = [str(step) for step in location if not (isinstance(step, str) and step[:1] == "<")]
    return ".".join(["body", *steps])


def _json_error(message: str, content: bytes) -> ApiError:
    """Return the error for malformed JSON; the path is the offset of the mistake if known."""
    try:
        json.loads(content)
    except json.JSONDecodeError as error:
        return bad_form((f"body.{error.pos}", f"JSON decode error: {error.msg}"))
    except (ValueError, RecursionError) as error:
        message = f"JSON decode error: {error}"
    return bad_form(("body", message))
