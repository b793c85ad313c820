"""Replaces parts of transformers' modules: linear layers, and norms that compute the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.transformers_modules.made_up import is_made_up, made_up


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [rows, n] with dense rows."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class LinearCut(NamedTuple):
    """The work of a linear layer beside its product, if ranks share it."""

    reduces: bool = False
    """True: the results of all ranks are summed."""
    gathers: int | None = None
    """Outputs of all ranks together; None: each rank has its own."""
    first_column: int | None = None
    """The first input of this rank, if it gets those of all; None: it gets its own."""


class PanelLinear(Layer):
    """``nn.Linear`` over our product: the same bits for any number of rows, weights in panels.

    ``weight`` reads as [out, in], also from panels. A weight that is read before it is finished
    stays in rows.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self.cut: LinearCut | None = None
        weight_of(weight)

    def __getattr__(self, name: str) -> Any:
        parameter = self._parameters.get(name)
        if name == "weight" and parameter is not None:
            weight = weight_of(parameter)
            if not weight.is_in_rows:
                return weight.look_up(torch.arange(weight.shape[0], device=parameter.device))
            weight.stays_in_rows = True
        return super().__getattr__(name)

    @property
    def rows(self) -> Weight:
        """The weight; this does not count as reading its parameter."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return weight_of(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows, cut = dense_rows(x), self.cut
        if cut is not None and cut.first_column is not None:
            rows = rows.narrow(1, cut.first_column, self.in_features)
        out = self.rows.multiply(rows, self.bias)
        if cut is not None and cut.reduces:
            out = tensor_model_parallel_all_reduce(out)
        if cut is not None and cut.gathers is not None:
            out = tensor_model_parallel_all_gather(out)[:, : cut.gathers]
        return out.reshape(*x.shape[:-1], self.out_features)


def replace_linear_layers(model: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` of ``model``; return how many there were."""
    return _replace(model, _as_ours)


def _replace(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each module by what ``make`` makes of it, at all its places; return how many."""
    made: dict[int, nn.Module | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in made:
                made[id(child)] = make(child)
            ours = made[id(child)]
            if ours is not None:
                setattr(parent, name, ours)
    return sum(ours is not None for ours in made.values())


def _as_ours(module: nn.Module) -> PanelLinear | None:
    from transformers.pytorch_utils import Conv1D

    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Linear:
        return PanelLinear(cast(nn.Parameter, module.weight), module.bias)
    if isinstance(module, Conv1D):  # GPT-2's layer, whose weight is [in, out]
        turned = module.weight.data.T
        is_real = not is_made_up(turned)
        turned = turned.contiguous() if is_real else made_up(turned.shape, turned.dtype)
        return PanelLinear(nn.Parameter(turned, requires_grad=False), module.bias)
    return None


class _Shared(nn.Module):
    """A norm of ours instead of a module that computes the same."""

    weight: nn.Parameter
    _plain: list[nn.Module]
    """The module; not a submodule, so its weights do not count twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> the same shape."""
        if x.dtype is not self.weight.dtype:  # a float32 stream in a model of another dtype
            plain: torch.Tensor = self._plain[0](x)
            return plain
        normed: torch.Tensor = super().forward(dense_rows(x))
        return normed.view(x.shape)


class _SharedRMSNorm(_Shared, RMSNorm):  # type: ignore[misc]
    pass


class _SharedGemmaRMSNorm(_Shared, GemmaRMSNorm):  # type: ignore[misc]
    pass


class _SharedLayerNorm(_Shared, LayerNorm):  # type: ignore[misc]
    pass


_NAMES_OF_EPSILON = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_PROBE_ROWS = 7


def replace_norms(model: nn.Module) -> int:
    """Replace every norm that gives the same rows as one of ours; return how many there were.

    A class is not judged by its name: both norms are tried on some rows.
    """
    return _replace(model, _norm_like)


def _norm_like(module: nn.Module) -> nn.Module | None:
    """A norm of ours with the module's weights that computes the same; None: there is none."""
    weight = module._parameters.get("weight")
    is_norm = type(module).__name__.endswith("Norm") and weight is not None and weight.dim() == 1
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    if not is_norm or has_hooks or len(inspect.signature(module.forward).parameters) != 1:
        return None
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(_PROBE_ROWS, len(weight), generator=generator)
    rows = rows.to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            expected = module(rows).float()
        except Exception:  # raised by a class that takes something other than rows
            return None
        for ours in _candidates(module, weight):
            # One unit in the last place: the two do not round at the same places.
            if torch.allclose(ours(rows).float(), expected, rtol=unit_of(weight.dtype), atol=1e-6):
                return ours
    return None


def unit_of(dtype: torch.dtype) -> float:
    """Relative difference that two ways of rounding may have."""
    return max(1e-5, 2 * torch.finfo(dtype).eps)


def _candidates(module: nn.Module, weight: nn.Parameter) -> Iterator[_Shared]:
    epsilon = next((vars(module)[n] for n in _NAMES_OF_EPSILON if n in vars(module)), None)
    if not isinstance(epsilon, float):
        return
    bias = module._parameters.get("bias")
    size = len(weight)
    norms: list[Any] = [_SharedRMSNorm(size, epsilon), _SharedGemmaRMSNorm(size, epsilon)]
    if isinstance(module, nn.LayerNorm):
        norms = [_SharedLayerNorm(size, eps=epsilon, bias=False)]
        norms[0].bias = bias
    elif bias is not None:
        return
    for norm in norms:
        norm.weight, norm._plain = weight, [module]
        yield norm
