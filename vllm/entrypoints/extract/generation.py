"""``--generate``: the settings of each text, and what a sample keeps of it besides its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from vllm.hidden_states.names import NUM_GENERATED
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.hidden_states.sample import HiddenStatesSample

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "n", "stop")
"""Options that need ``generate``."""
_MESSAGES, _TEXT, _CHOICE, _REASON = "messages", "text", "choice", "finish_reason"
COLUMNS = (_MESSAGES, _TEXT, _CHOICE, _REASON, NUM_GENERATED)
"""Columns of generated samples; columns of the input cannot be kept under these names."""


def sampling_of(settings: Mapping[str, Any]) -> SamplingParams:
    """Return the settings of a text. ValueError: one of them is wrong."""
    params = SamplingParams(**settings)
    params.n = 1  # each continuation is a sample of the plan
    return params


def params_of(
    sampling: SamplingParams, seed: int, record: int, columns: Mapping[str, Any]
) -> SamplingParams:
    """Return the settings of one sample, whose seed follows from the record and the choice, so
    that it does not matter who computes it."""
    own = sampling.copy()
    own.seed = xxhash.xxh3_64_intdigest(f"{seed}:{record}:{columns.get(_CHOICE, 0)}".encode())
    return own


def question_of(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation without the answers at its end. ValueError: it asks nothing."""
    kept = list(messages)
    while kept and isinstance(kept[-1], Mapping) and kept[-1].get("role") == "assistant":
        kept.pop()
    if not kept:
        raise ValueError("there is no message to answer")
    return kept


def source_columns(source: object) -> dict[str, Any]:
    """Return the column of a prompt that is a conversation or a text; token ids have none."""
    if isinstance(source, str):
        return {_TEXT: source}
    return {_MESSAGES: source} if source is not None else {}


def choices_of(count: int) -> list[dict[str, int]]:
    """Return the columns that tell the continuations of one prompt apart."""
    return [{}] if count == 1 else [{_CHOICE: choice} for choice in range(count)]


def with_answer(columns: Mapping[str, Any], sample: HiddenStatesSample) -> dict[str, Any]:
    """Return the columns of a sample with what was generated."""
    assert sample.output is not None
    found, answer = dict(columns), sample.output.text
    if _MESSAGES in found:
        found[_MESSAGES] = [*found[_MESSAGES], {"role": "assistant", "content": answer}]
    if _TEXT in found:
        found[_TEXT] += answer
    found[_REASON] = sample.output.finish_reason
    return found | {NUM_GENERATED: sample.num_generated_tokens}
