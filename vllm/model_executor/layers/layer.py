"""The base class of this engine's modules, whose calls and attributes cost little.

A decode step of a small model calls some hundred modules and reads twice as many parameters and
submodules, all by functions in Python.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

_global_pre_hooks = torch_modules._global_forward_pre_hooks
_global_hooks = torch_modules._global_forward_hooks


class Layer(nn.Module):
    """A module of torch; without hooks a call is a call of ``forward`` and nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or _global_pre_hooks
            or _global_hooks
            or self._compiled_call_impl is not None
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)


def is_watched(module: nn.Module) -> bool:
    """Tell whether foreign code sees calls of the module: hooks, or a ``forward`` put into it."""
    own = module.__dict__
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or _global_pre_hooks or _global_hooks
    return bool(hooks) or "forward" in own or module._compiled_call_impl is not None


def settle_attributes(model: nn.Module) -> None:
    """Make parameters and submodules of a loaded model plain attributes, too.

    If one of them is set to another parameter or module later, torch removes the plain attribute.
    Nothing may replace them in another way, such as ``Module.to`` another device.
    """
    for module in model.modules():
        vars(module).update(module._parameters)
        vars(module).update(module._modules)
