"""The engine's inputs for a request: prompts that fit the model, and SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.entrypoints.openai.errors import bad_form, bad_request
from vllm.entrypoints.openai.protocol import (
    MAX_ERRORS_TOLD,
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationBody,
    Messages,
)
from vllm.inputs import NO_TOKEN, ParsedPrompt
from vllm.inputs.prompt_embeds import read_embeds
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringVector, lens
from vllm.transformers_utils.answer_masks import MaskRule
from vllm.transformers_utils.answer_spans import render_masked
from vllm.transformers_utils.chat_template import ChatOptions, chat_text, unread_fields

if TYPE_CHECKING:
    from vllm.entrypoints.openai.state import ServerState

MAX_TRANSFER_BYTES = 1 << 18
"""Most bytes of ``kv_transfer_params``, which the engine copies for each choice."""
MAX_TEMPERATURE = 2.0
_NOT_SERVED = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "use_beam_search",
)  # fmt: skip
"""Fields of other servers that would change the output, so they are refused. Other unknown fields
are accepted."""
_SETTINGS = (GenerationBody.model_fields.keys() & set(SamplingParams.__struct_fields__)) - {
    "max_tokens", "prompt_logprobs", "steering", "top_k", "truncate_prompt_tokens"
}  # fmt: skip
"""Fields that a request and SamplingParams share, except those with their own treatment."""


def split_prompts(
    prompt: str | list[int] | list[str] | list[list[int]] | None, field: str = "prompt"
) -> list[str] | list[list[int]]:
    """Return the prompts in a field of a request; raises ApiError if one is missing or empty."""
    if prompt is None or prompt == "":
        raise bad_request(f"{field}: a text or token ids are needed", field)
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request(f"the {field} is empty: at least one token id is needed")
    if isinstance(prompt[0], int):
        return [prompt]
    prompts: list[str] | list[list[int]] = prompt
    for index, one in enumerate(prompts):
        if not one:
            raise bad_request(f"{field} {index} of the list is empty")
    return prompts


def split_embeds(state: ServerState, body: CompletionRequest) -> list[str] | None:
    """Return prompts that come as embeddings, or None; raises ApiError if they are not accepted."""
    texts = body.prompt_embeds
    if texts is None:
        return None
    if not state.engine.model_config.enable_prompt_embeds:
        raise bad_request(
            "prompt_embeds: this server takes text and token ids only (it was started without "
            "--enable-prompt-embeds)",
            "prompt_embeds",
        )
    if body.prompt or body.echo or body.truncate_prompt_tokens is not None:
        raise bad_request(
            "prompt_embeds: cannot be combined with prompt, echo or truncate_prompt_tokens",
            "prompt_embeds",
        )
    if not texts:
        raise bad_request("prompt_embeds: the list is empty", "prompt_embeds")
    return [texts] if isinstance(texts, str) else texts


def prompt_of_embeds(text: str) -> ParsedPrompt:
    """Return the prompt of one base64 text; raises ValueError if it is not valid."""
    embeds = read_embeds(text)
    num_tokens = len(embeds) if embeds.dim() else 1  # a scalar is refused later
    return ParsedPrompt(None, [NO_TOKEN] * num_tokens, embeds=embeds)


def tokenize(state: ServerState, prompt: str | list[int], body: GenerationBody) -> ParsedPrompt:
    """Tokenise one prompt of a completion request; raises ApiError if it has no tokens."""
    if not isinstance(prompt, str):
        return ParsedPrompt(None, prompt)
    token_ids = state.engine.input_processor.tokenize(
        prompt,
        may_be_long=body.truncate_prompt_tokens is not None,
        add_special_tokens=body.add_special_tokens is not False,
    )
    if not token_ids:
        raise bad_request("the prompt has no tokens", "prompt")
    return ParsedPrompt(prompt, token_ids)


def render(
    state: ServerState,
    messages: Messages,
    fields: ChatFields,
    add_special_tokens: bool,
    may_be_long: bool,
) -> ParsedPrompt:
    """Return the prompt that the chat template makes of a conversation.

    ``add_special_tokens``: add those of the tokenizer to those of the template. ``may_be_long``:
    accept more tokens than the context. Raises ValueError or ApiError if it cannot be rendered.
    """
    options = _chat_options(state, fields)
    listed = [dict(message) for message in messages]
    text = chat_text(state.engine.get_tokenizer(), listed, **options)
    if not text:
        raise bad_request("the chat template makes an empty prompt from these messages")
    token_ids = state.engine.input_processor.tokenize(
        text, may_be_long=may_be_long, add_special_tokens=add_special_tokens
    )
    return ParsedPrompt(text, token_ids)


def render_with_mask(
    state: ServerState, body: ChatCompletionRequest, rule: MaskRule
) -> tuple[ParsedPrompt, list[int]]:
    """Return the prompt of a conversation and its loss mask by a rule.

    Raises ValueError or ApiError if a field would move the tokens, or the answers are not found.
    """
    for name in ("truncate_prompt_tokens", "add_special_tokens"):
        if getattr(body, name):
            raise bad_request(f"{name}: not together with a rule for hidden_states.mask", name)
    listed = [dict(message) for message in body.messages]
    options = _chat_options(state, body)
    rendered, mask = render_masked(state.engine.get_tokenizer(), listed, rule, **options)
    return ParsedPrompt(rendered.get("prompt"), rendered["prompt_token_ids"]), mask.tolist()


def told_of_unread(state: ServerState, fields: ChatFields) -> list[str]:
    """Return texts about fields that the chat template does not read. Raises ApiError with
    ``--strict-requests`` if there are any, or ValueError if no conversation can be rendered."""
    names = unread_fields(state.engine.get_tokenizer(), **_chat_options(state, fields))
    return _told(state, names, "the chat template does not read it")


def told_of_no_chat(state: ServerState, fields: ChatFields) -> list[str]:
    """Return the same about fields for conversations in a request without one."""
    names = [name for name in ChatFields.model_fields if getattr(fields, name)]
    return _told(state, names, "there are no messages")


def _told(state: ServerState, names: Sequence[str], reason: str) -> list[str]:
    names = names[:MAX_ERRORS_TOLD]
    if names and state.settings.strict_requests:
        problem = f"{reason}; leave it out (--strict-requests)"
        raise bad_form(*((f"body.{name:.100}", problem) for name in names))
    return [f"the field {name[:100]!r} has no effect: {reason}" for name in names]


def _chat_options(state: ServerState, fields: ChatFields) -> ChatOptions:
    """Return the options of a rendering; raises ApiError if the request has its own template."""
    if fields.chat_template is not None:
        raise bad_request("chat_template: this server does not take templates from requests")
    variables = dict(fields.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        value = getattr(fields, name)
        if value and variables.setdefault(name, value) != value:
            raise bad_request(f"{name} is also in chat_template_kwargs: give it once")
    continues = bool(fields.continue_final_message)
    adds_prompt = fields.add_generation_prompt
    return {
        "chat_template": state.chat_template,
        "content_format": state.settings.chat_template_content_format,
        "add_generation_prompt": not continues if adds_prompt is None else adds_prompt,
        "continue_final_message": continues,
        "tools": fields.tools or None,
        "chat_template_kwargs": variables,
    }


def fit(
    state: ServerState, prompt: ParsedPrompt, body: GenerationBody, max_tokens: int | None
) -> ParsedPrompt:
    """Truncate the prompt to ``truncate_prompt_tokens``. ``max_tokens``: tokens of output.

    Raises ValueError if that many tokens cannot be kept.
    """
    keep, side = body.truncate_prompt_tokens, body.truncation_side or "left"
    kept = state.engine.input_processor.truncate(prompt.token_ids or [], keep, max_tokens, side)
    return prompt._replace(token_ids=kept, cache_salt=body.cache_salt)


def check_max_tokens(number: int | None, max_model_len: int) -> None:
    """Raise ApiError if no request can have this number of output tokens."""
    if number is not None and number < 1:
        raise bad_request(f"max_tokens must be at least 1, got {number}", "max_tokens")
    if number is not None and number > max_model_len:
        raise bad_request(
            f"max_tokens={number} is more than this model's context holds ({max_model_len} tokens)",
            "max_tokens",
        )


def make_sampling_params(
    state: ServerState,
    body: GenerationBody,
    steering: Sequence[SteeringVector] = (),
    **counted: int | None,
) -> SamplingParams:
    """Return the settings of ``body``; defaults come from the checkpoint, then SamplingParams.

    ``steering``: the vectors of its fields. ``counted``: max_tokens, logprobs and prompt_logprobs.
    Raises ValueError or ApiError if a setting cannot be served.
    """
    values = body.__dict__
    settings: dict[str, Any] = dict(state.default_sampling)
    settings |= {name: values[name] for name in _SETTINGS if values[name] is not None}
    if body.top_k is not None:
        settings["top_k"] = min(body.top_k, state.vocab_size)
    _check_settings(state, body)
    return SamplingParams.from_optional(
        **settings,
        **counted,
        steering=list(steering) or None,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        extra_args=_extra_args(body),
    )


def _check_settings(state: ServerState, body: GenerationBody) -> None:
    form = "text" if body.response_format is None else body.response_format.get("type")
    unsupported = "min_p" if body.min_p else "logit_bias" if body.logit_bias else None
    for name in _NOT_SERVED:
        if (body.model_extra or {}).get(name):
            raise bad_request(f"{name} is not supported")
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        message = f"temperature={body.temperature}: has to be in [0, {MAX_TEMPERATURE:g}]"
        raise bad_request(message, "temperature")
    if state.extracts and unsupported is not None:
        raise bad_request(f"{unsupported} is not supported by a server that extracts hidden states")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only with stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs: not with stream=true", "prompt_logprobs")
    if form != "text":
        raise bad_request(f"response_format: the type {form!r} is not supported, only 'text'")


def _extra_args(body: GenerationBody) -> dict[str, Any] | None:
    kv_transfer_params, xargs = body.kv_transfer_params, body.vllm_xargs
    extra = {} if xargs is None else {name: getattr(xargs, name) for name in lens.OPTIONS}
    extra = {name: value for name, value in extra.items() if value is not None}
    if kv_transfer_params is None:
        return extra or None
    try:
        num_bytes = len(msgspec.msgpack.encode(kv_transfer_params))
    except (OverflowError, RecursionError) as error:
        raise bad_request(f"kv_transfer_params: {error}") from None
    if num_bytes > MAX_TRANSFER_BYTES:
        raise bad_request(
            f"kv_transfer_params: have {num_bytes:,} bytes; at most {MAX_TRANSFER_BYTES:,} are "
            "handed to a connector",
            "kv_transfer_params",
        )
    return {**extra, "kv_transfer_params": kv_transfer_params}
