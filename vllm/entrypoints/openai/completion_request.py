"""A completion request: tokenised, checked, ready for the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import Request

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import (
    check_num_choices,
    make_request_id,
    token_namer,
)
from vllm.entrypoints.openai.logprobs import TokenName, completion_logprobs
from vllm.entrypoints.openai.prompts import (
    PromptTokens,
    is_small,
    split_prompts,
    tokenize_prompt,
)
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.responses import CompletionLogprobs
from vllm.entrypoints.openai.sampling import (
    check_asked_max_tokens,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.serving_models import check_model
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.transformers_utils.tokenizer import make_decoder
from vllm.v1.engine.input_processor import ProcessedInput

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class PreparedCompletion:
    """A checked request, one engine request a prompt."""

    body: CompletionRequest
    request_id: str
    requests: list[ProcessedInput]
    echo_texts: list[str] | None
    """The text of each prompt, where the answer begins with it."""
    shows_output: bool
    """False: only the prompt is wanted (``echo`` with ``max_tokens`` 0)."""
    token_name: TokenName


def prepare(
    state: ServerState, body: CompletionRequest, request_id: str, arrival_time: float
) -> PreparedCompletion:
    """Tokenise and check everything. ValueError, ApiError: it cannot be served."""
    check_model(state, body.model)
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix")
    prompts = split_prompts(body.prompt)
    check_num_choices(body.n, len(prompts))
    shows_output = not (body.echo and body.max_tokens == 0)
    asked = body.max_tokens if shows_output else 1
    check_asked_max_tokens(asked, state.max_model_len)
    fitted = [tokenize_prompt(state, prompt, body, asked) for prompt in prompts]
    return PreparedCompletion(
        body=body,
        request_id=request_id,
        requests=[
            _process(state, body, prompt, asked, f"{request_id}-{index}", arrival_time)
            for index, prompt in enumerate(fitted)
        ],
        echo_texts=[_text_of(state, prompt) for prompt in fitted] if body.echo else None,
        shows_output=shows_output,
        token_name=token_namer(state, body),
    )


def _process(
    state: ServerState,
    body: CompletionRequest,
    prompt: PromptTokens,
    asked_max_tokens: int | None,
    external_id: str,
    arrival_time: float,
) -> ProcessedInput:
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    params = make_sampling_params(
        state,
        body,
        max_tokens=resolve_max_tokens(
            asked_max_tokens, DEFAULT_MAX_TOKENS, len(prompt.token_ids), state.max_model_len
        ),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return state.client.input_processor.process(
        external_id,
        {
            "prompt_token_ids": prompt.token_ids,
            "prompt": prompt.text,
            "cache_salt": body.cache_salt,
        },
        params,
        arrival_time=arrival_time,
        priority=body.priority or 0,
    )


def _text_of(state: ServerState, prompt: PromptTokens) -> str:
    return make_decoder(state.client.get_tokenizer())(prompt.token_ids)


async def prepare_beside_loop(
    state: ServerState, body: CompletionRequest, request: Request
) -> PreparedCompletion:
    """:func:`prepare`, on a thread when it takes longer than a hand-over."""
    request_id, arrival_time = make_request_id("cmpl", request, body), time.time()
    if is_small(split_prompts(body.prompt)) and not body.echo and not body.bad_words:
        return prepare(state, body, request_id, arrival_time)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        state.client.renderer, prepare, state, body, request_id, arrival_time
    )


def logprobs_of(
    prepared: PreparedCompletion,
    output: RequestOutput,
    completion: CompletionOutput,
    with_prompt: bool,
    first_offset: int = 0,
) -> CompletionLogprobs | None:
    """Of the tokens that ``output`` adds to the text; None: nobody asked."""
    if completion.logprobs is None:
        return None
    token_ids: list[int] = []
    rows: list[dict[int, Logprob] | None] = []
    if with_prompt:
        token_ids += output.prompt_token_ids or []
        rows += output.prompt_logprobs or []
    if prepared.shows_output:
        token_ids += completion.token_ids
        rows += completion.logprobs
    return completion_logprobs(token_ids, rows, prepared.token_name, first_offset)


__all__ = ["PreparedCompletion", "logprobs_of", "prepare", "prepare_beside_loop"]
