"""Prompts of a request -> token ids that fit the model."""

from __future__ import annotations

from typing import NamedTuple

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import GenerationBody
from vllm.entrypoints.openai.state import ServerState

MAX_INLINE_TOKENS = 4096
"""Prompts of so many token ids in all are checked on the event loop: a thread costs more."""


class PromptTokens(NamedTuple):
    """One prompt; ``text`` is None where it was given as token ids."""

    token_ids: list[int]
    text: str | None


def split_prompts(
    prompt: str | list[int] | list[str] | list[list[int]] | None,
) -> list[str] | list[list[int]]:
    """The prompts of a completion request. ApiError: there is none, or an empty one."""
    if prompt is None or prompt == "":
        raise bad_request("prompt: a text or token ids are needed", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("the prompt is empty: at least one token id is needed")
    if isinstance(prompt[0], int):
        return [prompt]
    prompts: list[str] | list[list[int]] = prompt
    for index, one in enumerate(prompts):
        if not one:
            raise bad_request(f"prompt {index} of the list is empty")
    return prompts


def is_small(prompts: list[str] | list[list[int]]) -> bool:
    """Whether checking these prompts takes less time than handing them to a thread."""
    return not isinstance(prompts[0], str) and sum(map(len, prompts)) <= MAX_INLINE_TOKENS


def tokenize_prompt(
    state: ServerState, prompt: str | list[int], body: GenerationBody, max_tokens: int | None
) -> PromptTokens:
    """Token ids of one prompt, as :func:`fit_prompt` leaves them."""
    if not isinstance(prompt, str):
        return PromptTokens(fit_prompt(state, prompt, body, max_tokens), None)
    token_ids = state.engine.get_tokenizer().encode(
        prompt, add_special_tokens=body.add_special_tokens is not False, verbose=False
    )
    if not token_ids:
        raise bad_request("the prompt has no tokens", "prompt")
    return PromptTokens(fit_prompt(state, token_ids, body, max_tokens), prompt)


def fit_prompt(
    state: ServerState, token_ids: list[int], body: GenerationBody, max_tokens: int | None
) -> list[int]:
    """The ids as far as ``truncate_prompt_tokens`` keeps them.

    Raises:
        ApiError: they do not fit the context, or the model does not have one of them.
    """
    limit, highest_id = state.max_model_len, state.vocab_size - 1
    kept = _truncate(token_ids, body, max_tokens, limit)
    if len(kept) > limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens, but the prompt has "
            f"{len(kept)}. Shorten it, or set truncate_prompt_tokens.",
            "input_tokens",
        )
    if (highest := max(kept)) > highest_id:
        raise bad_request(
            f"Token id {highest} is out of vocabulary: the model's ids are 0 to {highest_id}"
        )
    return kept


def _truncate(
    token_ids: list[int], body: GenerationBody, max_tokens: int | None, max_model_len: int
) -> list[int]:
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if keep > max_model_len:
        raise bad_request(f"{name}={keep}: has to be at most {max_model_len} (the context)", name)
    if keep == 0:
        raise bad_request(f"{name}=0: has to be at least 1, or -1 for what fits", name)
    if keep == -1:
        keep = max(1, max_model_len - (max_tokens or 1))
    return token_ids[:keep] if body.truncation_side == "right" else token_ids[-keep:]
