"""Vectors that requests add to the stream, as tensors for one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from vllm.forward_context import Addition
from vllm.steering import SteeringSpec
from vllm.utils.transfers import to_device
from vllm.v1.rows.leaving import Ints
from vllm.v1.worker.input_batch import StepBatch

if TYPE_CHECKING:
    import numpy.typing as npt

Flags: TypeAlias = "npt.NDArray[np.bool_]"


def vectors_of(specs: Sequence[SteeringSpec] | None, device: torch.device) -> list[torch.Tensor]:
    """Return the vectors of a request, float32 [hidden] each, on the device."""
    arrays = (np.frombuffer(spec.vector, np.float32).copy() for spec in specs or ())
    return [to_device(array, device) for array in arrays]


def steering_of(batch: StepBatch, device: torch.device) -> Mapping[int, Sequence[Addition]] | None:
    """Return what is added in a step, by boundary; None: nothing."""
    if not any(state.steering_vectors for state in batch.states):
        return None
    found: dict[int, list[Addition]] = defaultdict(list)
    for index, state in enumerate(batch.states):
        start, end = batch.query_start[index : index + 2].tolist()
        positions = batch.positions[start:end]
        specs = state.sampling_params.steering or ()
        for spec, vector in zip(specs, state.steering_vectors, strict=True):
            chosen = _chosen(spec.positions, positions, state.num_prompt_tokens)
            if chosen.all():
                found[spec.layer_id].append(Addition(slice(start, end), vector, spec.norm_match))
            elif chosen.any():
                tokens = to_device(start + chosen.nonzero()[0], device)
                found[spec.layer_id].append(Addition(tokens, vector, spec.norm_match))
    return found or None


def _chosen(where: str | list[int], positions: Ints, num_prompt_tokens: int) -> Flags:
    """bool [tokens]: whether each of these positions is steered."""
    if where == "all":
        return np.ones(len(positions), dtype=bool)
    if isinstance(where, list):
        return np.isin(positions, where)
    is_prompt: Flags = positions < num_prompt_tokens
    return is_prompt if where == "prompt" else ~is_prompt
