"""DeviceConfig: the device that the engine runs on."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from vllm.platforms import Platform, get_platform
from vllm.utils.checked import config


@config()
class DeviceConfig:
    """The device that the engine runs on, and its platform."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on. "auto": a CUDA device if there is one, else the CPU."""

    @cached_property
    def platform(self) -> Platform:
        """Facts about the device."""
        return get_platform(self.device)

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.platform.device_type
