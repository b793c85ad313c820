"""When a request is at its end."""

from __future__ import annotations

from vllm.v1.engine import FinishReason
from vllm.v1.request import Request


def why_stop(request: Request, max_model_len: int) -> tuple[FinishReason | None, int | str | None]:
    """Whether the last token ends the request, and the stop token id if one did.

    A stop string that was found outside ends it with the next token. None: it goes on.
    """
    params = request.sampling_params
    if request.pending_stop is not None:
        return FinishReason.STOP, request.pending_stop
    if request.max_tokens == 0:
        is_done = request.num_finished_tokens >= request.num_prompt_tokens
        return (FinishReason.LENGTH if is_done else None), None
    if request.num_output_tokens == 0:
        return None, None
    if request.num_output_tokens >= params.min_tokens:
        last = request.all_token_ids[-1]
        if not params.ignore_eos and last in request.eos_token_ids:
            return FinishReason.STOP, None
        if params.stop_token_ids and last in params.stop_token_ids:
            return FinishReason.STOP, last
    is_full = request.num_tokens >= max_model_len
    if is_full or (
        request.max_tokens is not None and request.num_output_tokens >= request.max_tokens
    ):
        return FinishReason.LENGTH, None
    return None, None
