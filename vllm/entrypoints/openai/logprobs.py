"""Log-probabilities as the OpenAI API shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm.entrypoints.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsBody,
    TokenLogprob,
    TopLogprob,
)
from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

TokenName = Callable[[int, Logprob | None], str]


def name_by_text(decode: Callable[[Sequence[int]], str]) -> TokenName:
    """A token's name is its text; ``decode`` is asked where the engine did not say it."""

    def name(token_id: int, entry: Logprob | None) -> str:
        known = entry.decoded_token if entry is not None else None
        return decode([token_id]) if known is None else known

    return name


def name_by_id(token_id: int, entry: Logprob | None) -> str:
    """A token's name is its id: different tokens may read the same."""
    return f"token_id:{token_id}"


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob] | None],
    name: TokenName,
    first_offset: int,
) -> CompletionLogprobs:
    """One entry a token; ``rows[i]`` is what is known of position i (None: nothing)."""
    body = CompletionLogprobs([], [], [], [])
    offset = first_offset
    for token_id, row in zip(token_ids, rows, strict=True):
        entry = None if row is None else row[token_id]
        token = name(token_id, entry)
        body.tokens.append(token)
        body.text_offset.append(offset)
        body.token_logprobs.append(None if entry is None else max(entry.logprob, LOWEST))
        body.top_logprobs.append(None if row is None else _top(row, name))
        offset += len(token)
    return body


def _top(row: Mapping[int, Logprob], name: TokenName) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, entry in row.items():
        top.setdefault(name(token_id, entry), max(entry.logprob, LOWEST))
    return top


def chat_logprobs(
    token_ids: Sequence[int], rows: SampleLogprobs, num_top: int, name: TokenName
) -> ChatLogprobs:
    """One entry a token, with the ``num_top`` most likely ones at its place."""
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        chosen = _top_logprob(token_id, row[token_id], name)
        top = [
            _top_logprob(other, entry, name)
            for other, entry in row.items()
            if entry.rank is not None and entry.rank <= num_top
        ]
        top.sort(key=lambda item: -item.logprob)
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _top_logprob(token_id: int, entry: Logprob, name: TokenName) -> TopLogprob:
    token = name(token_id, entry)
    return TopLogprob(token, max(entry.logprob, LOWEST), list(token.encode()))


def prompt_logprobs_body(rows: PromptLogprobs | None) -> PromptLogprobsBody | None:
    """By token id, as a string."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token_id): PromptLogprob(max(one.logprob, LOWEST), one.rank, one.decoded_token)
            for token_id, one in row.items()
        }
        for row in rows
    ]
