"""Types and functions for calls of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.v1.worker.gpu_worker import Worker

Result = TypeVar("Result")
Weights: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
PauseMode = Literal["wait", "abort"]
"""The end of requests under way: they are completed, or aborted."""


def call_with_model(worker: Worker, func: Callable[[nn.Module], Any]) -> Any:
    """Call a function with a worker's model."""
    return func(worker.model_runner.model)
