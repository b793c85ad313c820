"""The fields that a request may ask for, besides those that its engine keeps of every token."""

from __future__ import annotations

from vllm.v1.rows.fields.layout import Field
from vllm.v1.rows.fields.logprobs import FullLogprobs, TopLogprobs

ALL_LOGPROBS = -1
"""The value of ``top_logprobs`` for the whole vocabulary."""


def requested_fields(
    top_logprobs: int, logprob_temperature: float, vocab_size: int
) -> tuple[Field, ...]:
    """Return the fields of a request with these options, in the order of their places in a row."""
    if not top_logprobs:
        return ()
    if top_logprobs == ALL_LOGPROBS:
        return (FullLogprobs(logprob_temperature, vocab_size),)
    return (TopLogprobs(top_logprobs, logprob_temperature, vocab_size),)
