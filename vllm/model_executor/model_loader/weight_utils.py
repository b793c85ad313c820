"""Helpers that bring a tensor of a checkpoint into a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from vllm.logger import init_logger
from vllm.model_executor.utils import LOADABLE_DTYPES, check_shape
from vllm.ops.packed_linear import PackedExperts, PackedWeight

logger = init_logger(__name__)

WeightLoader = Callable[..., Any]
"""``loader(parameter, loaded_weight)`` or ``loader(parameter, loaded_weight, shard_id)``."""

Stored = TypeVar("Stored")


class NamedWeight(NamedTuple, Generic[Stored]):
    """A weight of a checkpoint under the name that the model has for it."""

    name: str
    written: str
    """The checkpoint's spelling of the name."""
    weight: Stored


def each_once(
    weights: Iterable[tuple[str, Stored]], name_of: Callable[[str], str]
) -> Iterator[NamedWeight[Stored]]:
    """Yield weights under the names that the model has for them.

    One weight may have several spellings: with a prefix and without, or a float copy beside the
    tensors of a quantised one. ValueError: two of them are there, and either may be the right one.
    """
    spellings: dict[str, str] = {}
    for written, weight in weights:
        name = name_of(written)
        if name in spellings:
            raise given_twice(name, spellings[name], written)
        spellings[name] = written
        yield NamedWeight(name, written, weight)


def given_twice(name: str, first: str, second: str) -> ValueError:
    """Return the error for a weight that a checkpoint has under two spellings."""
    both = repr(name) if first == second else f"{name!r} (as {first!r} and {second!r})"
    return ValueError(
        f"weight {both} is in the checkpoint twice; take the one that is out of date away"
    )


def log_skipped(parts: Mapping[str, int]) -> None:
    """Log how many weights are skipped of each part of a checkpoint."""
    for part, count in parts.items():
        logger.info("Skipped %d weights %s: no layer of the model is made of them.", count, part)


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """ValueError: the tensor is not floats, so it cannot be loaded as it is."""
    if tensor.dtype not in LOADABLE_DTYPES:
        raise ValueError(
            f"weight {name!r} is {tensor.dtype} in the checkpoint, and no quantization_config says "
            "what it means; only float32, bfloat16 and float16 can be loaded"
        )


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, converting to its dtype and device."""
    check_shape(loaded_weight, tuple(param.shape))
    param.data.copy_(loaded_weight)


def dequantised(
    name: str, weight: PackedWeight | PackedExperts, dtype: torch.dtype
) -> torch.Tensor:
    """The weight as floats. ValueError: its inputs have to be rounded, which needs codes."""
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
