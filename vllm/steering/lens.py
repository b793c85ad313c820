"""The options of vllm-lens in ``SamplingParams.extra_args``: steering vectors and rows.

Its layer k is the output of decoder layer k, counted from 0, so it is layer id k + 1 here.
Source: https://github.com/UKGovernmentBEIS/vllm-lens (1.3).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.steering import SteeringVector
from vllm.utils.text import brief, parse_json

if TYPE_CHECKING:
    import torch

STEERING = "apply_steering_vectors"
ROWS = "output_residual_stream"
_REFUSED = {
    "apply_hooks": "it runs code of the request; use hooks= of extract(), or steering",
    "output_qk": "queries and keys are not returned; use hooks= of extract() for other values",
}
OPTIONS = (STEERING, ROWS, *_REFUSED)
"""Its options that have an effect or are refused."""
_FIELDS = {"activations", "layer_indices", "scale", "norm_match", "position_indices"}
_DTYPES = ("float32", "float16", "bfloat16")
_MOST_VECTORS = 1024
"""Most vectors of a request, as in its other forms."""
_MOST_DIMENSIONS = 8
MOST_UNPACKED_BYTES = 64 << 20
"""Most bytes of all tensors that come as JSON in one request: compressed ones are short there."""


def check_options(extra: Mapping[str, Any]) -> None:
    """Raise ValueError for options of vllm-lens that have no counterpart here."""
    for name, reason in _REFUSED.items():
        if extra.get(name) is not None:
            fail(name, f"is not supported: {reason}")


def steering_of(value: object) -> list[SteeringVector]:
    """Return the vectors of ``apply_steering_vectors``: objects with the attributes of vllm-lens'
    SteeringVector, dicts of its JSON, or a text of JSON."""
    value = _parsed(STEERING, value)
    if not isinstance(value, list | tuple) or len(value) > _MOST_VECTORS:
        most = f"at most {_MOST_VECTORS}"
        fail(STEERING, f"{brief(value)}: has to be a list of steering vectors, {most}")
    vectors: list[SteeringVector] = []
    room = MOST_UNPACKED_BYTES
    for one in value:
        fields = _fields(one)
        tensor, given = _tensor(fields["activations"], room), fields["activations"]
        room -= 0 if tensor is given else tensor.nbytes
        vectors.append(_vector(tensor, fields))
    return vectors


def rows_of(value: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layer ids of ``output_residual_stream``, ascending.

    ValueError: they are not layers of the model.
    """
    value = _parsed(ROWS, value)
    layers = range(num_layers) if value is True else value
    is_list = isinstance(layers, list | tuple | range) and bool(layers)
    if not is_list or not all(type(one) is int and 0 <= one < num_layers for one in layers):
        expected = f"true, or a list of layers from 0 to {num_layers - 1}"
        fail(ROWS, f"{brief(value)}: has to be {expected}")
    return tuple(sorted({one + 1 for one in layers}))


def _parsed(name: str, value: Any) -> Any:
    """Return the content of JSON, which HTTP clients send as text, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        fail(name, f"it is not JSON: {error}")


def _fields(one: Any) -> Mapping[str, Any]:
    given: Mapping[str, Any] = one
    if not isinstance(one, Mapping):
        given = {name: getattr(one, name) for name in _FIELDS if hasattr(one, name)}
    unknown = sorted(map(str, given.keys() - _FIELDS))
    if unknown or not {"activations", "layer_indices"} <= given.keys():
        expected = "activations and layer_indices, and only fields of vllm-lens' SteeringVector"
        fail(STEERING, f"{brief(unknown or one)}: each has to have {expected}")
    return given


def _vector(vectors: torch.Tensor, given: Mapping[str, Any]) -> SteeringVector:
    layers, places = given["layer_indices"], given.get("position_indices")
    if vectors.dim() not in (2, 3):
        fail(STEERING, f"activations have {vectors.dim()} dimensions: has to be 2 or 3")
    if vectors.dim() == 2 and places is not None:
        fail(
            STEERING,
            "position_indices with activations [layers, hidden], which are added everywhere: give "
            "[layers, positions, hidden]",
        )
    are_ids = isinstance(layers, list | tuple) and all(
        type(one) is int and 0 <= one < 2**31 - 1 for one in layers
    )
    if not are_ids:  # integers without bounds may all have the same hash
        fail(STEERING, f"layer_indices={brief(layers)}: has to be a list of layers")
    if len({*layers}) < len(layers):
        fail(STEERING, f"layer_indices={brief(layers)}: has a layer twice")
    positions: Any = "all"
    if vectors.dim() == 3:
        positions = range(vectors.shape[1]) if places is None else places
    return SteeringVector(
        vectors,
        [layer + 1 for layer in layers],
        given.get("scale", 1.0),
        positions,
        given.get("norm_match", False),
    )


def _tensor(value: Any, room: int) -> torch.Tensor:
    """Return a tensor, or that of a dict of vllm-lens' JSON, whose data may be compressed.

    ``room``: most bytes of the latter.
    """
    import torch

    if torch.is_tensor(value):
        return value
    try:
        name, shape = value.get("original_dtype") or value["dtype"], value["shape"]
        name = name.removeprefix("torch.")
        dtype: torch.dtype = getattr(torch, name) if name in _DTYPES else _fail_dtype(name)
        is_shape = isinstance(shape, list | tuple) and len(shape) <= _MOST_DIMENSIONS
        if not is_shape or not all(type(one) is int and one > 0 for one in shape):
            raise ValueError(f"shape {brief(shape)} is not a list of sizes")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > room:
            raise ValueError(
                f"with shape {brief(shape)} the tensors of this request have more than "
                f"{MOST_UNPACKED_BYTES:,} bytes"
            )
        data = base64.b64decode(value["data"], validate=True)
        if value.get("compression") == "zstd":
            import pyarrow

            data = pyarrow.decompress(data, num_bytes, "zstd", asbytes=True)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    except Exception as error:  # whatever damaged JSON leads to
        reason = str(error).partition("\n")[0] or type(error).__name__
        fail(STEERING, f"activations are not a tensor of vllm-lens' JSON: {reason}")


def _fail_dtype(name: object) -> NoReturn:
    raise ValueError(f"dtype {brief(name)}: has to be one of {', '.join(_DTYPES)}")


def fail(name: str, problem: str) -> NoReturn:
    """Raise the error for an option of vllm-lens."""
    raise VLLMValidationError(f'extra_args["{name}"]: {problem}', parameter="extra_args")
