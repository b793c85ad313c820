"""Parts of transformers' modules that are ours too: linear layers, and norms that compute alike."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.ops.linear import linear, make_panels, prefers_panels, weight_of_panels


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [rows, n], each of them dense."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class PackedLinear(LinearBase):
    """``nn.Linear`` over our product: the same bits for any number of rows, weights in panels.

    Whoever reads ``weight`` gets [out, in], also when it lies in panels; one that was read by
    others before it was to be packed stays as it is.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, prefix: str) -> None:
        rows, columns = weight.shape
        with torch.device("meta"):
            super().__init__(
                rows,
                columns,
                bias=False,
                skip_bias_add=False,
                params_dtype=weight.dtype,
                quant_config=None,
                prefix=prefix,
                return_bias=False,
            )
        self.in_features, self.out_features = columns, rows
        self.weight = weight
        self.bias = bias
        self.stays_as_it_is = False
        """Something else reads the weight too."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            panels = self._parameters.get("panels")
            if panels is not None:
                return weight_of_panels(panels, self.out_features, self.in_features)
            self.stays_as_it_is = True
        return super().__getattr__(name)

    def pack_weight(self) -> None:
        weight = self._parameters["weight"]
        assert weight is not None
        if not self.stays_as_it_is and prefers_panels(weight.device):
            self.panels = nn.Parameter(make_panels(weight.data), requires_grad=False)
            del self._parameters["weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = dense_rows(x)
        out = rows.new_empty((len(rows), self.out_features))
        self.multiply_rows(rows, out)
        return out.view(*x.shape[:-1], self.out_features)

    def multiply_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """rows: [rows, in_features] -> out: [rows, out_features], strided."""
        weight = self._parameters.get("panels")
        if weight is None:
            weight = self._parameters["weight"]
        assert weight is not None
        linear(rows, weight, self.bias, out)


def replace_linear_layers(model: nn.Module) -> int:
    """Put ours in the place of every plain ``nn.Linear`` of ``model``; how many there were."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))

    def make(module: nn.Module, name: str) -> PackedLinear | None:
        ours = _as_ours(module, name)
        if ours is not None:
            ours.stays_as_it_is = owners[id(ours._parameters["weight"])] > 1
        return ours

    return _replace(model, make)


def _replace(model: nn.Module, make: Callable[[nn.Module, str], nn.Module | None]) -> int:
    """Put what ``make`` makes of a module and its name in its place, wherever that is; how many."""
    made: dict[int, nn.Module | None] = {}
    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in made:
                made[id(child)] = make(child, f"{prefix}.{name}")
            ours = made[id(child)]
            if ours is not None:
                setattr(parent, name, ours)
    return sum(ours is not None for ours in made.values())


def _as_ours(module: nn.Module, prefix: str) -> PackedLinear | None:
    from transformers.pytorch_utils import Conv1D

    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Linear:
        return PackedLinear(cast(nn.Parameter, module.weight), module.bias, prefix)
    if isinstance(module, Conv1D):  # GPT-2's, whose weight is [in, out]
        turned = module.weight.data.T.contiguous()
        return PackedLinear(nn.Parameter(turned, requires_grad=False), module.bias, prefix)
    return None


class _Shared(nn.Module):
    """A norm of ours in the place of a module that computes the same."""

    weight: nn.Parameter
    _plain: list[nn.Module]
    """The module; no submodule, so that its weights do not count twice."""

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
    """Put ours in the place of every norm that gives the same rows; how many there were.

    What a class computes is not read off its name: both are tried on some rows.
    """
    return _replace(model, lambda module, name: _norm_like(module))


def _norm_like(module: nn.Module) -> nn.Module | None:
    """A norm of ours with the module's weights that does the same; None: it is none, or another."""
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
        except Exception:  # whatever a class that takes something else than rows makes of them
            return None
        for ours in _candidates(module, weight):
            # One unit in the last place: where the two round is not the same everywhere.
            if torch.allclose(ours(rows).float(), expected, rtol=unit_of(weight.dtype), atol=1e-6):
                return ours
    return None


def unit_of(dtype: torch.dtype) -> float:
    """What two ways to round may differ by, relatively."""
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
