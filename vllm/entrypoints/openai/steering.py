"""Steering over HTTP: the vectors in bodies of requests, and the endpoints of named ones."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from fastapi import APIRouter

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import GenerationBody, SteeringRequest, TensorField
from vllm.entrypoints.openai.responses import SteeringVectorCard, SteeringVectorList
from vllm.entrypoints.openai.state import ServerState, State
from vllm.steering import SteeringVector
from vllm.utils.text import brief

router = APIRouter(prefix="/v1/steering_vectors", tags=["steering"])


def requested_steering(state: ServerState, body: GenerationBody) -> list[SteeringVector]:
    """Return the vectors that a body asks for. ApiError: they cannot be used."""
    extra = None if body.vllm_xargs is None else body.vllm_xargs.steering
    if body.steering is not None and extra is not None:
        raise bad_request("steering is also in vllm_xargs: give it once")
    asked = body.steering if body.steering is not None else extra
    asked = [] if asked is None else asked
    return [_vector(state, one) for one in (asked if isinstance(asked, list) else [asked])]


def _vector(state: ServerState, asked: SteeringRequest | str) -> SteeringVector:
    if isinstance(asked, str):
        return state.steering.find(asked)
    given = asked.model_dump(include={"scale", "positions", "norm_match"}, exclude_none=True)
    if asked.name is None:
        if asked.vectors is None or asked.layers is None:
            raise bad_request("steering: an object has a name, or vectors and layers")
        return SteeringVector(tensor_of(asked.vectors), asked.layers, **given)
    if asked.vectors is not None or asked.layers is not None:
        raise bad_request(
            f"steering name={brief(asked.name)}: the name stands for vectors and layers; leave "
            "those out"
        )
    named = state.steering.find(asked.name)
    return SteeringVector(named.vectors, named.layers, **given)


def tensor_of(given: TensorField) -> torch.Tensor:
    """Return a tensor of JSON. ApiError: it is damaged."""
    dtype: torch.dtype = getattr(torch, given.dtype)
    try:
        data = base64.b64decode(given.data, validate=True)
    except ValueError as error:
        raise bad_request(f"steering vectors: data is not base64: {error}") from None
    expected = math.prod(given.shape) * dtype.itemsize
    if len(data) != expected or not data:
        raise bad_request(
            f"steering vectors: data has {len(data)} bytes, and shape={brief(given.shape)} of "
            f"{given.dtype} has {expected}; there has to be at least one element"
        )
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(given.shape)


@router.get("")
async def list_vectors(state: State) -> SteeringVectorList:
    """List the vectors that requests can name."""
    return SteeringVectorList(data=state.steering.cards())


@router.get("/{name}")
async def get_vector(name: str, state: State) -> SteeringVectorCard:
    """Describe the vectors of one name."""
    return state.steering.card(name)


@router.delete("/{name}")
async def delete_vector(name: str, state: State) -> dict[str, Any]:
    """Forget vectors. Requests that have begun keep them."""
    state.steering.remove(name)
    await state.share()
    return {"id": name, "object": "steering_vector", "deleted": True}
