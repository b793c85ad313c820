"""Building models and reading checkpoints."""

from __future__ import annotations

from typing import Any

__all__ = ["get_model"]


def __getattr__(name: str) -> Any:
    # Imported late: models import weight_utils from this package, and the loader imports models.
    if name == "get_model":
        from vllm.model_executor.model_loader.loader import get_model

        return get_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
