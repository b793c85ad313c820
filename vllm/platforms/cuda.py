"""The current CUDA device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch

from vllm.platforms.interface import Platform

_BFLOAT16_CAPABILITY = (8, 0)
_SMALL_HIDDEN_SIZE = 2048
"""Of models whose kernels, 8,192 tokens at a time, take hardly longer than launching them."""
_SEGMENTS_BESIDE_BYTES = 2 * (2 + 20) * 2**20
"""Tensors come and go in another order than in the run that was measured, so that a segment for
small ones and one for larger ones may be needed more, on each of the two streams."""


class CudaPlatform(Platform):
    """Facts of torch's current CUDA device; every method needs one to be there."""

    device_type = "cuda"
    # Enough that launching the kernels takes less than they do, unless the model is small.
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
        if not torch.cuda.is_available():  # of this an engine asks first
            raise ValueError("device='cuda': torch finds no CUDA device here; use 'cpu' or 'auto'")
        if torch.cuda.get_device_capability() >= _BFLOAT16_CAPABILITY:
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    @property
    def attention_backends(self) -> tuple[str, ...]:
        # Our own first: its rows have the same bits in any batch, FlashInfer's do not.
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
        """What ``memory_utilization`` of the whole device leaves after what is in use."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(0, int(total * memory_utilization) - (total - free))

    def measure_peak_bytes(self, run: Callable[[], None]) -> int:
        """By the segments that torch took from the device, of which tensors fill a part only.

        Kernels that were loaded meanwhile are not counted: they are in use when
        :meth:`kv_cache_budget_bytes` looks.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before + _SEGMENTS_BESIDE_BYTES

    def measure_held_bytes(self, make: Callable[[], object]) -> int:
        """By what the device has left: recorded graphs take memory that torch does not see."""
        free = []
        for run in (lambda: None, make):
            run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        return max(0, free[0] - free[1])

    def set_num_threads(self) -> int:
        """The host computes little: torch's own choice stays."""
        return torch.get_num_threads()

    def share_of_machine(self, slot: int, num_engines: int) -> dict[str, str]:
        count = torch.cuda.device_count()
        if num_engines > count:
            raise ValueError(f"data_parallel_size={num_engines}: there are {count} devices")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[slot] if visible[0] else str(slot)}
