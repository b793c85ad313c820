"""The current CUDA device."""

from __future__ import annotations

import torch

from vllm.platforms.interface import Platform

_BFLOAT16_CAPABILITY = (8, 0)


class CudaPlatform(Platform):
    """Facts of torch's current CUDA device; every method needs one to be there."""

    device_type = "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        if torch.cuda.get_device_capability() >= _BFLOAT16_CAPABILITY:
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    def total_memory_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def available_memory_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def kv_cache_budget_bytes(self, memory_utilization: float) -> int:
        """What ``memory_utilization`` of the whole device leaves after what is in use."""
        free, total = torch.cuda.mem_get_info()
        return max(0, int(total * memory_utilization) - (total - free))

    def set_num_threads(self) -> int:
        """The host computes little: torch's own choice stays."""
        return torch.get_num_threads()
