"""Encoders of something else than text, which a text does not pass through."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.transformers_modules.boundaries import failures_refuse

_TOKENS = 3


def drop_encoders(model: Any) -> None:
    """Leave out the parts of the model that a pass over text does not call.

    Looked at are the outer ones, never parts of a decoder: experts may be called for other texts.
    NotServableError: it computes nothing of text alone.
    """
    outer = [
        (parent, name, child)
        for parent in (model, *model.children())
        for name, child in parent.named_children()
    ]
    called: set[nn.Module] = set()
    handles = [
        part.register_forward_pre_hook(lambda module, _: called.add(module))
        for _, _, child in outer
        for part in child.modules()
    ]
    ids = torch.arange(1, _TOKENS + 1, device=next(model.parameters()).device)[None]
    try:
        with torch.inference_mode(), failures_refuse():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for parent, name, child in outer:
        if called.isdisjoint(child.modules()):
            parent._modules[name] = nn.Identity()
