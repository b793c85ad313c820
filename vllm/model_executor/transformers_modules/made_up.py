"""Weights of made-up values in little memory, where only shapes and structure count."""

from __future__ import annotations

import torch
from torch import nn


def made_up(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Make random values in that shape; each row begins one element after the row before it."""
    values = torch.randn(sum(shape) + 1, generator=torch.Generator().manual_seed(0))
    fan_in = shape[-1] if shape else 1
    small: torch.Tensor = (values / fan_in**0.5).to(dtype)
    return small.as_strided(shape, [1] * len(shape))


def is_made_up(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory."""
    return bool(tensor.untyped_storage().nbytes() < tensor.nbytes)


def make_up(model: nn.Module) -> None:
    """Give values to all parameters and buffers on the device "meta"."""
    made: dict[int, nn.Parameter] = {}  # some parameters are tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if id(parameter) not in made:
                    values = made_up(parameter.shape, parameter.dtype)
                    made[id(parameter)] = nn.Parameter(values, False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():  # stored buffers, like tables of experts
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
