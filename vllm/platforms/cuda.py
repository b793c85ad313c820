"""The current CUDA device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch

from vllm.platforms.interface import Platform

_BFLOAT16_CAPABILITY = (8, 0)
_SMALL_HIDDEN_SIZE = 2048
"""Hidden size up to which kernels on 8,192 tokens take hardly longer than their launches."""
_SEGMENTS_BESIDE_BYTES = 2 * (2 + 20) * 2**20
"""Margin for segments: tensors come and go in another order than in the measured run, so each of
the two streams may need one more segment for small tensors and one more for larger ones."""


class CudaPlatform(Platform):
    """torch's current CUDA device; every method requires one."""

    device_type = "cuda"
    # Enough tokens that kernels take longer than their launches, unless the model is small.
    default_max_num_batched_tokens = default_max_num_batched_tokens_of_servers = 8192
    recurrent_chunk_tokens = 64  # triton_recurrent_pieces.CHUNK, which needs Triton

    def max_num_batched_tokens_of(self, hidden_size: int) -> int:
        steps = 2 if hidden_size <= _SMALL_HIDDEN_SIZE else 1
        return steps * self.default_max_num_batched_tokens

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        if not torch.cuda.is_available():  # checked here: an engine reads this property first
            raise ValueError("device='cuda': torch finds no CUDA device here; use 'cpu' or 'auto'")
        if torch.cuda.get_device_capability() >= _BFLOAT16_CAPABILITY:
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    @property
    def attention_backends(self) -> tuple[str, ...]:
        # Our own comes first: its rows have the same bits in any batch, FlashInfer's do not.
        if importlib.util.find_spec("flashinfer") is None:
            return ("TRITON_ATTN",)
        return ("TRITON_ATTN", "FLASHINFER")

    def why_no_attention_backend(self, name: str) -> str:
        if name == "FLASHINFER":
            return "FlashInfer is not installed"
        return super().why_no_attention_backend(name)

    def total_memory_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def available_memory_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def kv_cache_budget_bytes(self, memory_utilization: float) -> int:
        """``memory_utilization`` of the whole device, less the memory in use."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(0, int(total * memory_utilization) - (total - free))

    def measure_peak_bytes(self, run: Callable[[], None]) -> int:
        """Measure the segments that torch took from the device; tensors fill only a part of them.

        Kernels loaded meanwhile are not counted: :meth:`kv_cache_budget_bytes` sees them as
        memory in use.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before + _SEGMENTS_BESIDE_BYTES

    def measure_held_bytes(self, make: Callable[[], object]) -> int:
        """Measure the device's free memory: recorded graphs take memory that torch does not see."""
        free = []
        for run in (lambda: None, make):
            run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        return max(0, free[0] - free[1])

    def set_num_threads(
        self, rank: int = 0, num_ranks: int = 1, num_cpus: int | None = None
    ) -> int:
        """Keep torch's own choice: the host computes little."""
        return torch.get_num_threads()

    def share_of_machine(self, slot: int, num_engines: int) -> dict[str, str]:
        count = torch.cuda.device_count()
        if num_engines > count:
            raise ValueError(f"data_parallel_size={num_engines}: there are {count} devices")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[slot] if visible[0] else str(slot)}
