"""Replies with the rows that clients of vllm-lens ask for and read."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.extraction import byte_limit
from vllm.entrypoints.openai.protocol import GenerationBody
from vllm.entrypoints.openai.responses import LensTensor
from vllm.entrypoints.openai.state import ServerState
from vllm.hidden_states.tensor_file import bytes_of, dtype_name
from vllm.steering import lens

if TYPE_CHECKING:
    import torch

    from vllm.v1.engine.input_processor import ProcessedInput


def check_lens(
    state: ServerState, body: GenerationBody, requests: Sequence[ProcessedInput]
) -> None:
    """Raise ApiError if the reply cannot have the rows that vllm-lens' options ask for."""
    for processed in requests:
        spec = processed.request.extraction
        if spec is None:
            continue
        if body.stream or len(requests) > 1:
            raise bad_request(
                f"{lens.ROWS}: not with stream=true, nor with several prompts, because the reply "
                "has one tensor; use hidden_states, or a request for each prompt"
            )
        model, limit = state.engine.model_config, byte_limit(state.settings, "hidden_states")
        num_tokens = len(processed.request.prompt_token_ids)
        num_tokens += processed.request.sampling_params.max_tokens or 0
        row_bytes = len(spec.layer_ids) * model.get_row_size() * model.dtype.itemsize
        if num_tokens * row_bytes > limit.num_bytes:
            raise bad_request(
                f"{lens.ROWS}: the rows take up to {num_tokens * row_bytes:,} bytes, and at most "
                f"{limit.num_bytes:,} are allowed: {limit.advice}"
            )


def lens_tensor(tensor: torch.Tensor) -> LensTensor:
    """Return a tensor as vllm-lens reads it; numpy has no bfloat16."""
    name = dtype_name(tensor.dtype)
    return LensTensor(
        data=base64.b64encode(bytes_of(tensor)).decode(),
        shape=list(tensor.shape),
        dtype="int16" if name == "bfloat16" else name,
        original_dtype=f"torch.{name}",
    )
