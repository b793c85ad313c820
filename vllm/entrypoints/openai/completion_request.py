"""A completion request: tokenised, checked, ready for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import Incoming
from vllm.entrypoints.openai.logprobs import TokenName, completion_logprobs
from vllm.entrypoints.openai.prompts import is_small, split_prompts, tokenize_prompt
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.responses import CompletionLogprobs
from vllm.entrypoints.openai.sampling import check_asked_max_tokens, resolve_max_tokens
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.transformers_utils.tokenizer import make_decoder
from vllm.v1.engine.input_processor import ProcessedInput

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 16384
"""Continuations that one HTTP request may ask for in all."""


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


def prepare(incoming: Incoming[CompletionRequest]) -> PreparedCompletion:
    """Tokenise and check everything. ValueError, ApiError: it cannot be served."""
    state, body = incoming.state, incoming.body
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix")
    prompts = split_prompts(body.prompt)
    if (body.n or 1) * len(prompts) > MAX_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts with n={body.n} are more than {MAX_CHOICES} choices"
        )
    shows_output = not (body.echo and body.max_tokens == 0)
    asked = body.max_tokens if shows_output else 1
    check_asked_max_tokens(asked, state.max_model_len)
    fitted = [tokenize_prompt(state, prompt, body, asked) for prompt in prompts]
    prompt_logprobs = body.logprobs if body.echo else None
    if body.prompt_logprobs is not None:
        prompt_logprobs = body.prompt_logprobs
    requests = [
        incoming.process(
            prompt,
            suffix=f"-{index}",
            max_tokens=resolve_max_tokens(
                asked, DEFAULT_MAX_TOKENS, len(prompt.token_ids), state.max_model_len
            ),
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        for index, prompt in enumerate(fitted)
    ]
    echo_texts = None
    if body.echo:
        echo_texts = [make_decoder(state.engine.get_tokenizer())(one.token_ids) for one in fitted]
    return PreparedCompletion(
        body, incoming.request_id, requests, echo_texts, shows_output, incoming.token_name
    )


async def prepare_beside_loop(
    state: ServerState, body: CompletionRequest, request: Request
) -> PreparedCompletion:
    """:func:`prepare`, on a thread when it takes longer than a hand-over."""
    incoming = Incoming.take(state, "cmpl", request, body)
    if is_small(split_prompts(body.prompt)) and not body.echo and not body.bad_words:
        return prepare(incoming)
    return await state.beside_loop(prepare, incoming)


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
