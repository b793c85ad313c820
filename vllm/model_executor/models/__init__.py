"""Model families, the registry of their classes, and their interfaces."""

from __future__ import annotations

from vllm.model_classes import ModelRegistry
from vllm.model_executor.models.interfaces import (
    EagleModelMixin,
    HasInnerState,
    IsHybrid,
    SupportsEagle3,
    SupportsPP,
    SupportsRowCapture,
    VllmModel,
    VllmModelForTextGeneration,
    has_inner_state,
    is_hybrid,
    supports_eagle3,
    supports_pp,
    supports_row_capture,
)

__all__ = [
    "EagleModelMixin",
    "HasInnerState",
    "IsHybrid",
    "ModelRegistry",
    "SupportsEagle3",
    "SupportsPP",
    "SupportsRowCapture",
    "VllmModel",
    "VllmModelForTextGeneration",
    "has_inner_state",
    "is_hybrid",
    "supports_eagle3",
    "supports_pp",
    "supports_row_capture",
]
