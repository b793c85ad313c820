"""Importing transformers without torch's compiler."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_disable: Callable[..., Any] = torch.compiler.disable


@contextmanager
def without_compiler() -> Iterator[None]:
    """For imports: ``torch.compiler.disable`` marks a function when it is called first.

    Configs of transformers import modules that mark some, and to mark one imports the compiler
    and Triton: 90 MiB of memory, and as much time as all else that reading a config takes.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    torch.compiler.disable = _disable_later
    try:
        yield
    finally:
        torch.compiler.disable = _disable


def _disable_later(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Arguments and results are those of ``torch.compiler.disable``."""
    if fn is None:
        return functools.partial(_disable_later, recursive=recursive, reason=reason)
    if not inspect.isfunction(fn):
        return _disable(fn, recursive, reason=reason)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disabled.append(_disable(fn, recursive, reason=reason))
        return disabled[0](*args, **kwargs)

    return call
