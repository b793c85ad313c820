"""From a tensor of a checkpoint to a parameter of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from vllm.ops.packed_linear import PackedExperts, PackedWeight, unpacks_weights

WeightLoader = Callable[..., Any]
"""``loader(parameter, loaded_weight)`` or ``loader(parameter, loaded_weight, shard_id)``."""

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightShapeError(ValueError):
    """A tensor of the file has another shape than the layer holds."""

    def __init__(self, file_shape: torch.Size, expected_shape: tuple[int, ...]) -> None:
        self.file_shape = tuple(file_shape)
        self.expected_shape = expected_shape
        super().__init__(f"has shape {self.file_shape} in the file, expected {expected_shape}")


def check_shape(
    loaded_weight: torch.Tensor | PackedWeight | PackedExperts, expected_shape: tuple[int, ...]
) -> None:
    """Raise :class:`WeightShapeError` unless the file's tensor has this shape."""
    if tuple(loaded_weight.shape) != expected_shape:
        raise WeightShapeError(loaded_weight.shape, expected_shape)


Stored = TypeVar("Stored")


class NamedWeight(NamedTuple, Generic[Stored]):
    """A weight of a checkpoint under the name that the model has for it."""

    name: str
    written: str
    """As the checkpoint spells it."""
    weight: Stored


def each_once(
    weights: Iterable[tuple[str, Stored]], name_of: Callable[[str], str]
) -> Iterator[NamedWeight[Stored]]:
    """Weights under the names that the model has for them.

    Several spellings may mean one weight: with a prefix and without, a float copy beside the
    tensors of a quantised one. ValueError: two of them are there, and either may be the right one.
    """
    spellings: dict[str, str] = {}
    for written, weight in weights:
        name = name_of(written)
        if name in spellings:
            other = spellings[name]
            both = repr(name) if other == written else f"{name!r} (as {other!r} and {written!r})"
            raise ValueError(
                f"weight {both} is in the checkpoint twice; take the one that is out of date away"
            )
        spellings[name] = written
        yield NamedWeight(name, written, weight)


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """ValueError: what the file calls so are no weights as they are."""
    if tensor.dtype not in LOADABLE_DTYPES:
        raise ValueError(
            f"weight {name!r} is {tensor.dtype} in the checkpoint; without a "
            "quantization_config that says what it means, only float32, bfloat16 and float16 "
            "can be loaded"
        )


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, converting to its dtype and device."""
    check_shape(loaded_weight, tuple(param.shape))
    param.data.copy_(loaded_weight)


def stays_packed(param: torch.Tensor, weight: PackedWeight | PackedExperts) -> bool:
    """Whether the loader of ``param`` takes such a weight, and products unpack it there."""
    takes_packed: bool = getattr(param, "takes_packed", False)
    return takes_packed and unpacks_weights(param.device) and weight.can_be_panels()


def dequantised(
    name: str, weight: PackedWeight | PackedExperts, dtype: torch.dtype
) -> torch.Tensor:
    """The weight as floats. ValueError: its inputs are to be rounded, which they are not then."""
    if weight.activations is not None:
        raise ValueError(
            f"activation_quantization='as_served': weight {name!r} is dequantised while it loads, "
            "and its inputs are not rounded; the option is for linear layers that stay packed "
            "(docs/quantization.md)"
        )
    return weight.dequantise(dtype)


def weight_loader_of(param: torch.Tensor) -> WeightLoader:
    """The loader that a layer attached to its parameter, or the plain copy."""
    loader: WeightLoader = getattr(param, "weight_loader", default_weight_loader)
    return loader
