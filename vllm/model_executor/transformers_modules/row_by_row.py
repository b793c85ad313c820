"""Replaces functions of torch whose bits depend on a row's place while a module runs.

On the CPU the order of sums in torch's products depends on the number of rows, and some elementwise
functions use one formula for whole vectors and another for the rest (vllm.ops.plain_math). A module
of transformers may call them anywhere, so they are intercepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vllm.model_executor.transformers_modules.parts import dense_rows
from vllm.ops import plain_math
from vllm.ops.activations import sigmoid_gate
from vllm.ops.gelu import gelu, gelu_tanh
from vllm.ops.linear import linear
from vllm.ops.operation import KERNEL_DTYPES

Function = Callable[..., Any]


class RowByRow(TorchFunctionMode):
    """Inside the block a row has the same bits whatever other rows are there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = _OWN.get(func)
        if own is None or args[0].device.type != "cpu" or args[0].dtype not in KERNEL_DTYPES:
            return func(*args, **(kwargs or {}))
        return own(*args, **(kwargs or {}))


class ProductWatch(TorchFunctionMode):
    """Notes which functions decoder layers call in a pass over ``num_tokens`` tokens."""

    def __init__(self, num_tokens: int, is_inside_layer: Callable[[], bool]) -> None:
        super().__init__()
        self.products: set[str] = set()
        """Functions whose bits may depend on the batch."""
        self.makes_positions = False
        """True if something counts the tokens of the pass, which belong to several requests."""
        self._num_tokens = num_tokens
        self._is_inside_layer = is_inside_layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_inside_layer():
            name = getattr(func, "__name__", "")
            if name in _PRODUCTS and not _is_outer_product(args):
                self.products.add(name)
            if name == "arange" and len(result) == self._num_tokens:
                self.makes_positions = True
        return result


_PRODUCTS = frozenset(
    {
        "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm", "einsum",
        "conv1d", "grouped_mm", "_grouped_mm", "scaled_dot_product_attention", "cumsum",
    }
)  # fmt: skip


def _is_outer_product(args: tuple[Any, ...]) -> bool:
    """Return whether the product sums nothing, as in ``inverse frequencies @ positions``."""
    if len(args) != 2 or not all(torch.is_tensor(x) and x.dim() > 1 for x in args):
        return False
    return bool(args[0].shape[-1] == 1)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    is_ours = weight.dim() == 2 and weight.dtype is x.dtype and weight.stride(1) == 1
    if not is_ours or not (bias is None or bias.dtype is x.dtype):
        return functional.linear(x, weight, bias)
    rows = dense_rows(x)
    out = x.new_empty((len(rows), weight.shape[0]))
    linear(rows, weight, None if bias is None else bias.contiguous(), out)
    return out.view(*x.shape[:-1], weight.shape[0])


def _by_rows(operation: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
    """Apply an activation of [rows, n] to a tensor of any shape."""
    rows = dense_rows(x)
    out = rows.new_empty(rows.shape)
    operation(rows, out)
    return out.view(x.shape)


def _sigmoid_of_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    ones = x.new_ones(x.shape[1]).expand(x.shape)
    sigmoid_gate(ones[:, None], x[:, None], out[:, None])


def _silu_of_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    sigmoid_gate(x[:, None], x[:, None], out[:, None])


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _by_rows(_sigmoid_of_rows, x)


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    result = _by_rows(_silu_of_rows, x)
    return x.copy_(result) if inplace else result


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _by_rows(gelu if approximate == "none" else gelu_tanh, x)


def _softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    scaled = x.float() * beta
    result = torch.where(scaled > threshold, x.float(), plain_math.softplus(scaled) / beta)
    return result.to(x.dtype)


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.float()).to(x.dtype)


_OWN: dict[Any, Function] = {
    functional.linear: _linear,
    functional.silu: _silu,
    functional.gelu: _gelu,
    functional.softplus: _softplus,
    torch.sigmoid: _sigmoid,
    torch.Tensor.sigmoid: _sigmoid,
    torch.rsqrt: _rsqrt,
    torch.Tensor.rsqrt: _rsqrt,
}
