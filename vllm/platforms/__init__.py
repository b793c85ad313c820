"""Platforms: the capabilities of each kind of device.

``current_platform`` is the platform of this machine's default device, found on first
use; ``get_platform(device_type)`` returns the one that a configuration asks for.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms.interface import Platform

current_platform: Platform

__all__ = ["Platform", "current_platform", "get_platform"]


@functools.cache
def get_platform(device_type: str) -> Platform:
    """The platform of ``device_type``: "cpu", "cuda", or "auto" for the best one here."""
    import torch

    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device_type == "cuda":
        from vllm.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise ValueError(f"device={device_type!r} is not supported; use 'auto', 'cpu' or 'cuda'")


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return get_platform("auto")
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
