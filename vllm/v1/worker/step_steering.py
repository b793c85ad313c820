"""Vectors that requests add to the stream, as tensors for one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from vllm.forward_context import Addition, Additions, Steering
from vllm.steering import SteeringSpec
from vllm.utils.transfers import to_device
from vllm.v1.rows.leaving import Ints
from vllm.v1.worker.input_batch import RequestState, StepBatch

if TYPE_CHECKING:
    import numpy.typing as npt

Flags: TypeAlias = "npt.NDArray[np.bool_]"


def vectors_of(specs: Sequence[SteeringSpec], device: torch.device) -> list[torch.Tensor]:
    """Return the vectors of a request, float32 [hidden] or [positions, hidden] each, on the
    device."""
    arrays = (
        np.frombuffer(spec.vector, np.float32).reshape(*spec.leading_shape, spec.width).copy()
        for spec in specs
    )
    return [to_device(array, device) for array in arrays]


def steering_of(batch: StepBatch, device: torch.device) -> Steering | None:
    """Return what is added in a step; None: nothing."""
    if not any(state.steering_vectors for state in batch.states):
        return None
    found: dict[int, list[Addition]] = defaultdict(list)
    for index, state in enumerate(batch.states):
        start, end = batch.query_start[index : index + 2].tolist()
        for layer_id, addition in _additions(state, batch.positions[start:end], start, device):
            found[layer_id].append(addition)

    def of_request(index: int, positions: range) -> Additions:
        own: dict[int, list[Addition]] = defaultdict(list)
        for layer_id, one in _additions(batch.states[index], np.array(positions), 0, device):
            own[layer_id].append(one)
        return own

    return Steering(found, of_request)


def _additions(
    state: RequestState, positions: Ints, start: int, device: torch.device
) -> Iterator[tuple[int, Addition]]:
    """Yield what is added to a request's tokens, with its boundary.

    positions: those of the tokens in the text; start: the index of the first token in the pass.
    """
    specs = state.sampling_params.steering_specs
    for spec, vectors in zip(specs, state.steering_vectors, strict=True):
        chosen = _chosen(spec.positions, positions, state.num_prompt_tokens)
        if not chosen.any():
            continue
        if spec.is_by_position:
            rows = np.searchsorted(np.array(spec.positions), positions[chosen])
            vectors = vectors[to_device(rows, device)]
        tokens: slice | torch.Tensor = slice(start, start + len(positions))
        if not chosen.all():
            tokens = to_device(start + chosen.nonzero()[0], device)
        yield spec.layer_id, Addition(tokens, vectors, spec.norm_match)


def _chosen(where: str | list[int], positions: Ints, num_prompt_tokens: int) -> Flags:
    """bool [tokens]: whether each of these positions is steered."""
    if where == "all":
        return np.ones(len(positions), dtype=bool)
    if isinstance(where, list):
        return np.isin(positions, where)
    is_prompt: Flags = positions < num_prompt_tokens
    return is_prompt if where == "prompt" else ~is_prompt
