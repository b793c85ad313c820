"""Activations between the products of an MLP, by their names in configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.utils import UnsupportedConfigError
from vllm.ops.activations import clamped_swiglu, relu_squared, silu_and_mul
from vllm.ops.gelu import gelu, gelu_and_mul, gelu_tanh, gelu_tanh_and_mul


class _Gate(Layer):
    """``activation(gate) * up`` in one operation."""

    operation: Callable[..., Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 2n] as (gate | up) -> [tokens, n]."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        self.operation(x, out)
        return out


class SiluAndMul(_Gate):
    """``silu(gate) * up``."""

    operation = silu_and_mul


class GeluAndMul(_Gate):
    """``gelu(gate) * up``; approximate: "none" (uses the error function) or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.operation = gelu_tanh_and_mul if approximate == "tanh" else gelu_and_mul


class SwigluOAIAndMul(_Gate):
    """``(up + 1) * gate * sigmoid(alpha * gate)``, both clamped (GPT-OSS)."""

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.operation = lambda x, out: clamped_swiglu(x, alpha, limit, out)


class _GateOf(_Gate):
    """``activation(gate) * up`` in two operations."""

    def __init__(self, activation: Callable[..., Any]) -> None:
        super().__init__()
        self.activation = activation

    def operation(self, x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=1)
        self.activation(gate.contiguous(), out)
        out.mul_(up)


class _Elementwise(Layer):
    """An activation without a gate."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, n] -> [tokens, n]."""
        out = torch.empty_like(x)
        self.operation(x, out)
        return out


def _relu(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.clamp_min(x, 0.0, out=out)


_TANH_FORMS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
_GATES: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "swish": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_python": GeluAndMul,
    **dict.fromkeys(_TANH_FORMS, lambda: GeluAndMul("tanh")),
    "relu": lambda: _GateOf(_relu),
    "relu2": lambda: _GateOf(relu_squared),
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    **dict.fromkeys(_TANH_FORMS, gelu_tanh),
    "relu": _relu,
    "relu2": relu_squared,
}


def get_act_and_mul_fn(name: str, option: str = "hidden_act") -> nn.Module:
    """Make the gate that a config's ``option`` names; UnsupportedConfigError: it is not known."""
    gate: nn.Module = _look_up(_GATES, name, option)()
    return gate


def get_act_fn(name: str, option: str = "hidden_act") -> nn.Module:
    """Make the activation without a gate that a config's ``option`` names."""
    return _Elementwise(_look_up(_PLAIN, name, option))


def _look_up(known: dict[str, Callable[..., Any]], name: object, option: str) -> Callable[..., Any]:
    if not isinstance(name, str) or name not in known:
        supported = ", ".join(map(repr, known))
        raise UnsupportedConfigError(f"{option}={name!r} is not supported; supported: {supported}")
    return known[name]
