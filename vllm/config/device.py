"""DeviceConfig: what the engine runs on."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from vllm.platforms import Platform, get_platform
from vllm.utils.checked import config


@config()
class DeviceConfig:
    """The device asked for, and the platform that answers for it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device the model runs on. "auto": CUDA where there is one, else the CPU."""

    @cached_property
    def platform(self) -> Platform:
        """Facts about the device. ValueError: it is asked for by name, and is not there."""
        if self.device == "cuda":
            import torch

            try:
                torch.cuda.init()
            except (AssertionError, RuntimeError) as error:  # not built for it; no driver, no card
                raise ValueError(
                    f"device='cuda' cannot be used: {error}; use 'auto' or 'cpu'"
                ) from error
        return get_platform(self.device)

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.platform.device_type
