"""Parts of transformers' modules that are certainly ours too: linear layers."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn

from vllm.model_executor.layers.linear import LinearBase
from vllm.ops.linear import linear, make_panels, prefers_panels, weight_of_panels


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [rows, n], each of them dense."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
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
        weight = self._parameters.get("panels")
        if weight is None:
            weight = self._parameters["weight"]
        assert weight is not None
        rows = dense_rows(x)
        out = rows.new_empty((len(rows), self.out_features))
        linear(rows, weight, self.bias, out)
        return out.view(*x.shape[:-1], self.out_features)


def replace_linear_layers(model: nn.Module) -> int:
    """Put ours in the place of every plain ``nn.Linear`` of ``model``; how many there were."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    made: dict[int, PackedLinear] = {}
    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            ours = made.get(id(child)) or _as_ours(child, f"{prefix}.{name}")
            if ours is None:
                continue
            ours.stays_as_it_is = owners[id(ours._parameters["weight"])] > 1
            made[id(child)] = ours
            setattr(parent, name, ours)
    return len(made)


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
