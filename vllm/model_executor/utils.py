"""Helpers that every layer needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from vllm.ops.packed_linear import PackedExperts, PackedWeight


class UnsupportedConfigError(ValueError):
    """The config has an option that this engine's class does not support; transformers' may.

    option: the entry of the config; None: transformers' module supports all that its config allows.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightShapeError(ValueError):
    """A tensor of the file has another shape than the layer's weight."""

    def __init__(self, file_shape: torch.Size, expected_shape: tuple[int, ...]) -> None:
        self.file_shape = tuple(file_shape)
        self.expected_shape = expected_shape
        super().__init__(f"has shape {self.file_shape} in the file, expected {expected_shape}")


class WeightFormatError(ValueError):
    """Rows of one form cannot replace a weight's rows of another form."""

    def __init__(self, new: str, kept: str) -> None:
        super().__init__(
            f"cannot be replaced: it is kept as {kept}, and the new rows are {new}; give rows that "
            "are stored alike, or start a new engine with them"
        )


def check_shape(
    loaded_weight: torch.Tensor | PackedWeight | PackedExperts, expected_shape: tuple[int, ...]
) -> None:
    """Raise :class:`WeightShapeError` unless the file's tensor has this shape."""
    if tuple(loaded_weight.shape) != expected_shape:
        raise WeightShapeError(loaded_weight.shape, expected_shape)


def set_weight_attrs(weight: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Attach attributes (its ``weight_loader``, most of all) to a parameter, once each."""
    for name, value in attributes.items():
        assert not hasattr(weight, name), f"the parameter already has {name}"
        setattr(weight, name, value)


def make_parameter(values: torch.Tensor, loader: Callable[..., None] | None = None) -> nn.Parameter:
    """Make a parameter without gradients from ``values``; loader: its ``weight_loader``."""
    parameter = nn.Parameter(values, requires_grad=False)
    if loader is not None:
        set_weight_attrs(parameter, {"weight_loader": loader})
    return parameter


class ElsewhereParameter(nn.Parameter):
    """A parameter that another pipeline stage has: a shape without memory, on "meta"."""


def is_all_ours(model: nn.Module) -> bool:
    """Return whether all modules in ``model`` are this engine's or torch's; a third-party module
    may use anything in it."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return packages <= {"vllm", "torch"}
