"""Modules that keep something of a pass in themselves, where no cache of ours reaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from vllm.model_executor.transformers_modules.boundaries import NotServableError


def check_keeps_nothing(module: nn.Module, run: Callable[[torch.Tensor], None], num: int) -> None:
    """Run passes over ``num`` tokens, [1, num], with other tokens: what differs then is kept.

    Tables that depend on positions alone are the same after both.
    """
    device = next(module.parameters()).device
    run(torch.zeros(1, num, dtype=torch.int64, device=device))
    before = {name: tensor.clone() for name, tensor in _tensors(module)}
    run(torch.ones(1, num, dtype=torch.int64, device=device))
    changed = [
        name
        for name, tensor in _tensors(module)
        if name not in before or not _are_same(before[name], tensor)
    ]
    if changed:
        raise NotServableError(f"it keeps what it computed of a pass in {', '.join(changed[:4])}")


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes and buffers of all its modules; parameters are none."""
    for path, each in module.named_modules():
        for name, value in (*vars(each).items(), *each._buffers.items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | (a != a) & (b != b)).all())
    )
