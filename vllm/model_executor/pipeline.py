"""The weights of a model that one pipeline stage keeps.

All stages build the same modules, so that layers, hook points and caches have the same names and
numbers everywhere. Parameters of other stages are on the device "meta": they have shapes and no
memory, and no weights are read for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.utils import ElsewhereParameter


def keep_parameters(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Take the memory of all parameters from a model but for those of some parts.

    ValueError: one of the parts reads the cache of a layer that is in none of them.
    """
    keep_parameters_of(model, {module for part in parts for module in part.modules()})


def keep_parameters_of(model: nn.Module, modules: Collection[nn.Module]) -> None:
    """Do the same for single modules: those inside of them do not count."""
    for module in modules:
        owner = module.cache_owner if isinstance(module, Attention) else None
        if isinstance(module, Attention) and owner not in modules:
            assert owner is not None
            raise ValueError(
                f"{module.layer_name!r} reads the cache of {owner.layer_name!r}, which is in "
                "another stage; set VLLM_PP_LAYER_PARTITION so that both are in one"
            )
    kept = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in kept:
                empty = ElsewhereParameter(parameter.data.to("meta"), requires_grad=False)
                module.register_parameter(name, empty)
