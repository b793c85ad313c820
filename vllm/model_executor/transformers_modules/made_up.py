"""Weights of made-up values in little memory, where only shapes and structure count."""

from __future__ import annotations

import torch
from torch import nn


def made_up(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Make random values in that shape; each row begins one element after the row before it.

    Of several matrices each begins one element after the one before it, because grouped products
    want rows side by side.
    """
    strides = [1] * len(shape) if len(shape) < 3 else [1] * (len(shape) - 2) + [shape[-1], 1]
    size = 1 + sum(stride * n for stride, n in zip(strides, shape, strict=True))
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    fan_in = shape[-1] if shape else 1
    small: torch.Tensor = (values / fan_in**0.5).to(dtype)
    return small.as_strided(shape, strides)


def is_made_up(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory."""
    return bool(tensor.untyped_storage().nbytes() < tensor.nbytes)


def make_up(model: nn.Module) -> None:
    """Give values to all parameters and buffers on the device "meta"."""
    made: dict[int, nn.Parameter] = {}  # some parameters are tied
    shared: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if id(parameter) not in made:
                    form = parameter.shape, parameter.dtype
                    if form not in shared:
                        shared[form] = made_up(*form)
                    made[id(parameter)] = nn.Parameter(shared[form], False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():  # stored ones: tables of experts, factors
            if buffer is not None and buffer.device.type == "meta":
                # A factor of zero would leave nothing of the stream.
                value = torch.tensor(buffer.dtype.is_floating_point, dtype=buffer.dtype)
                module._buffers[name] = value.expand(buffer.shape)
