"""The endpoints of TRL's own server (``trl vllm-serve``, TRL 1.0 to 1.10), and those of vLLM's
server that later versions of TRL use besides the OpenAI API.

They serve TRL's clients: log-probabilities of a teacher, and generation in batches. Those for
weights are in ``weights.py``.
"""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import Field, Strict, ValidationError
from starlette.responses import Response

from vllm.entrypoints.openai.address_fields import IN_ADDRESS
from vllm.entrypoints.openai.completion import Completion
from vllm.entrypoints.openai.errors import ApiError, bad_form, bad_request
from vllm.entrypoints.openai.extraction import byte_limit
from vllm.entrypoints.openai.limits import at_end, reply_files
from vllm.entrypoints.openai.protocol import (
    MAX_TOOLS,
    Body,
    ChatFields,
    CompletionRequest,
    Messages,
    Prompt,
    TokenIds,
    form_error,
)
from vllm.entrypoints.openai.request_prompts import render, told_of_unread
from vllm.entrypoints.openai.state import ServerState, State
from vllm.hidden_states.names import MOST_LOGPROBS
from vllm.hidden_states.sample import ExtractRequest, HiddenStatesSample
from vllm.outputs import RequestOutput, SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.extraction_settings import ExtractionSettings

router = APIRouter(include_in_schema=False)

_MOST_SEQUENCES = 16384
_ENTRY_BYTES = 8
"""Bytes of a token id and its log-probability."""
_KNOWN_SETTINGS = frozenset(CompletionRequest.model_fields) & (
    {*SamplingParams.__struct_fields__} - {"output_kind", "extra_args"}
)
"""Settings that ``generation_kwargs`` may have."""


class SequenceLogprobsRequest(Body):
    """Body of /get_sequence_logprobs/."""

    sequences: Annotated[list[TokenIds], Field(max_length=_MOST_SEQUENCES, fail_fast=True)]
    """Token ids of prompt and completion."""
    prompt_lengths: Annotated[list[Annotated[int, Strict()]], Field(fail_fast=True)]
    """The number of each sequence's tokens that belong to the prompt."""
    top_logprobs: Annotated[int, Strict(), Field(ge=1, le=MOST_LOGPROBS)] = 100
    temperature: Annotated[float, Strict(), Field(ge=1e-4, le=1e4)] = 1.0
    response_format: Literal["json", "binary"] = "json"

    def check(self) -> None:
        """Raise ApiError unless there is a length within each sequence."""
        if len(self.sequences) != len(self.prompt_lengths):
            raise bad_request(
                f"prompt_lengths: has {len(self.prompt_lengths)} numbers for "
                f"{len(self.sequences)} sequences"
            )
        for index, (ids, length) in enumerate(self.parts):
            if not 0 <= length <= len(ids):
                raise bad_request(
                    f"prompt_lengths.{index}={length}: has to be in [0, {len(ids)}], the length of "
                    "its sequence"
                )

    @property
    def parts(self) -> list[tuple[list[int], int]]:
        """Each sequence and the length of its prompt."""
        return list(zip(self.sequences, self.prompt_lengths, strict=True))


class _Generation(Body):
    """Fields that /generate/ and /chat/ share; they are checked as those of a completion."""

    n: Any = 1
    repetition_penalty: Any = 1.0
    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = -1
    min_p: Any = 0.0
    max_tokens: Any = 16
    logprobs: Any = 0
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = None

    def completion(self, prompts: list[str] | list[list[int]]) -> CompletionRequest:
        """Return the completion request; raises ApiError for a setting that is not known."""
        more = self.generation_kwargs or {}
        unknown = [f"generation_kwargs.{name}" for name in more if name not in _KNOWN_SETTINGS]
        unknown += ["structured_outputs_regex"] * (self.structured_outputs_regex is not None)
        if unknown:
            raise bad_request(f"{unknown[0]:.100} is not supported; leave it out")
        named = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
        fields = {name: getattr(self, name) for name in (*named, "logprobs", "model")} | more
        try:
            return CompletionRequest.model_validate({"prompt": prompts, **fields})
        except ValidationError as error:
            raise form_error(error) from None


class GenerateRequest(_Generation):
    """Body of /generate/."""

    prompts: Prompt
    """Texts, or lists of token ids."""
    images: list[Any] | None = None
    """Not supported: null, or a null for each prompt."""


class ChatRequest(_Generation):
    """Body of /chat/."""

    messages: Annotated[list[Messages], Field(max_length=_MOST_SEQUENCES, fail_fast=True)]
    """A conversation for each answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


def _warnings(body: Body) -> dict[str, Any]:
    return {"warnings": body._warnings} if body._warnings else {}


# ---- log-probabilities


@router.post("/get_sequence_logprobs/")
async def get_sequence_logprobs(
    state: State,
    request: Request,
    body: Annotated[SequenceLogprobsRequest, Depends(SequenceLogprobsRequest.read)],
) -> Response:
    """Return the most likely tokens at each position of the completions, and the actual token."""
    body.check()
    state.check_model(body.model)
    adapter = state.adapters.find(body.model)
    is_binary = body.response_format == "binary"
    limit = byte_limit(state.settings, None if is_binary else 'response_format="binary"')
    lengths = [len(ids) - length for ids, length in body.parts]
    count = len(lengths) * max(lengths, default=0)
    if is_binary and count * _entry_bytes(body) > limit.num_bytes:
        raise bad_request(
            f"sequences: arrays of {len(lengths)} times {max(lengths)} tokens take more than "
            f"{limit.num_bytes} bytes; {limit.advice}"
        )
    settings = ExtractionSettings(
        layers=0,  # the smallest rows: only the log-probabilities are used
        positions="all",
        dtype=None,
        is_ordered=True,
        on_error="raise",
        max_in_flight=None,
        top_logprobs=min(body.top_logprobs, state.vocab_size),
        logprob_temperature=body.temperature,
        byte_limit=limit,
        is_one_request=True,
    )
    places = [index for index, part in enumerate(body.parts) if len(_positions(*part))]
    requests = [
        ExtractRequest(
            {"prompt_token_ids": ids}, positions=_positions(ids, length), lora_request=adapter
        )
        for ids, length in (body.parts[index] for index in places)
    ]
    model = state.engine.model_config
    row_bytes = model.get_row_size() * model.dtype.itemsize + _entry_bytes(body)
    num_rows = sum(len(_positions(*body.parts[index])) for index in places)
    await state.row_memory.reserve(num_rows * row_bytes, at_end(request.scope))
    samples: dict[int, HiddenStatesSample] = {}
    async with aclosing(state.engine.extract_with(requests, settings)) as found:
        async for sample in found:
            assert isinstance(sample, HiddenStatesSample)
            samples[places[sample.index]] = sample
    shape = _as_arrays if is_binary else _as_lists
    content = await asyncio.to_thread(lambda: json.dumps(shape(body, samples) | _warnings(body)))
    return Response(content, media_type="application/json")


def _entry_bytes(body: SequenceLogprobsRequest) -> int:
    return _ENTRY_BYTES * (body.top_logprobs + 1)


def _positions(ids: list[int], prompt_length: int) -> range:
    """Return the positions whose next tokens are those of the completion; the first token of a
    sequence is nobody's next."""
    return range(max(prompt_length - 1, 0), len(ids) - 1)


def _as_lists(
    body: SequenceLogprobsRequest, samples: dict[int, HiddenStatesSample]
) -> dict[str, Any]:
    """Return lists of the most likely tokens, and the actual one behind them if it is another."""
    logprobs: list[list[list[float]]] = []
    token_ids: list[list[list[int]]] = []
    for index, (ids, length) in enumerate(body.parts):
        # Nothing predicts the first token of a sequence.
        found: list[tuple[list[int], list[float]]] = [([], [])] * (length == 0 and bool(ids))
        if index in samples:
            names = ("top_token_ids", "top_logprobs", "token_logprobs")
            rows = zip(*(samples[index].tensors[name].tolist() for name in names), strict=True)
            for actual, (likely, values, value) in zip(ids[max(length, 1) :], rows, strict=True):
                more = actual not in likely
                found.append((likely + [actual] * more, values + [value] * more))
        token_ids.append([one for one, _ in found])
        logprobs.append([one for _, one in found])
    return {"logprobs": logprobs, "logprob_token_ids": token_ids}


def _as_arrays(
    body: SequenceLogprobsRequest, samples: dict[int, HiddenStatesSample]
) -> dict[str, Any]:
    """Return arrays in base64, padded with minus infinity and token 0."""
    lengths = [len(ids) - length for ids, length in body.parts]
    shape = (len(lengths), max(lengths, default=0), body.top_logprobs)
    top, actual = np.full(shape, -np.inf, "<f4"), np.full((*shape[:2], 1), -np.inf, "<f4")
    top_ids, actual_ids = np.zeros(shape, "<i4"), np.zeros((*shape[:2], 1), "<i4")
    for index, sample in samples.items():
        ids, length = body.parts[index]
        rows, k = slice(int(length == 0), lengths[index]), sample.tensors["top_token_ids"].shape[1]
        top[index, rows, :k] = sample.tensors["top_logprobs"].numpy()
        top_ids[index, rows, :k] = sample.tensors["top_token_ids"].numpy()
        actual[index, rows, 0] = sample.tensors["token_logprobs"].numpy()
        actual_ids[index, rows, 0] = ids[max(length, 1) :]
    return {
        "logprobs_b64": base64.b64encode(top.data).decode(),
        "token_ids_b64": base64.b64encode(top_ids.data).decode(),
        "actual_logprobs_b64": base64.b64encode(actual.data).decode(),
        "actual_token_ids_b64": base64.b64encode(actual_ids.data).decode(),
        "shape": shape,
        "completion_lengths": lengths,
    }


# ---- generation


@router.post("/generate/")
async def generate(
    state: State,
    request: Request,
    body: Annotated[GenerateRequest, Depends(GenerateRequest.read)],
) -> dict[str, Any]:
    """Continue each prompt."""
    if any(image is not None for image in body.images or ()):
        raise bad_request("images: this server takes text and token ids only")
    if not isinstance(body.prompts, list) or (body.prompts and isinstance(body.prompts[0], int)):
        raise bad_form(("body.prompts", "Input should be a list of strings or of lists of ids"))
    prompts: Any = body.prompts
    return await _generate(state, request, body.completion(prompts)) | _warnings(body)


@router.post("/chat/")
async def chat(
    state: State, request: Request, body: Annotated[ChatRequest, Depends(ChatRequest.read)]
) -> dict[str, Any]:
    """Answer each conversation."""
    fields = ChatFields(tools=body.tools, chat_template_kwargs=body.chat_template_kwargs)
    body.completion([])  # settings are checked before anything is rendered

    def render_all() -> list[list[int]]:
        body._warnings += told_of_unread(state, fields)
        rendered = (render(state, one, fields, False, may_be_long=False) for one in body.messages)
        return [one.token_ids or [] for one in rendered]

    prompts = await state.beside_loop(request, render_all)
    return await _generate(state, request, body.completion(prompts)) | _warnings(body)


async def _generate(
    state: ServerState, request: Request, body: CompletionRequest
) -> dict[str, Any]:
    if not body.prompt:
        return _as_reply([], body)
    outputs = await Completion(state, body, request).outputs()
    reply_files(request.scope).discard()  # the reply has no place for their paths
    return await asyncio.to_thread(_as_reply, outputs, body)


def _as_reply(outputs: list[RequestOutput], body: CompletionRequest) -> dict[str, Any]:
    completions = [one for output in outputs for one in output.outputs]
    rows = [_by_rank(one.logprobs or []) for one in completions]
    has_logprobs = body.logprobs is not None
    return {
        "prompt_ids": [output.prompt_token_ids for output in outputs],
        "completion_ids": [list(one.token_ids) for one in completions],
        "logprobs": [logprobs for _, logprobs in rows] if has_logprobs else None,
        "logprob_token_ids": [ids for ids, _ in rows] if has_logprobs else None,
    }


def _by_rank(rows: SampleLogprobs) -> tuple[list[list[int]], list[list[float]]]:
    """Return ids and log-probabilities at each position, the most likely token first."""
    ranked = [sorted(row.items(), key=lambda item: item[1].rank or 0) for row in rows]
    ids = [[token_id for token_id, _ in row] for row in ranked]
    return ids, [[entry.logprob for _, entry in row] for row in ranked]


# ---- the server


@router.get("/health/")
async def get_health(state: State) -> dict[str, str]:
    """Return 200 while the engine runs."""
    if state.engine.errored or state.engine.is_stopped:
        raise ApiError(503, "the engine is gone or stopped")
    return {"status": "ok"}


@router.get("/get_world_size")
@router.get("/get_world_size/")
async def get_world_size(state: State) -> dict[str, int]:
    """Return the number of ranks."""
    return {"world_size": state.engine.vllm_config.parallel_config.world_size}


@router.post("/reset_prefix_cache", dependencies=IN_ADDRESS)
@router.post("/reset_prefix_cache/", dependencies=IN_ADDRESS)
async def reset_prefix_cache(state: State) -> dict[str, Any]:
    """Forget every cached prefix, and end an update of the weights: TRL calls it at the end."""
    await state.weights.finish()
    await state.engine.reset_prefix_cache()
    return {"success": True, "message": "Request received, resetting prefix cache status: True"}
