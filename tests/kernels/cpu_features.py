"""What the CPU can do, and what the environment leaves of it."""

from __future__ import annotations

import os

from vllm import envs
from vllm.kernels.native_cpu import NativeCpuKernels, NativeKernelsUnavailable

_BEFORE_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def why_no_bfloat16_products() -> str | None:
    """What is missing for the CPU's own dot products of bfloat16, here and in oneDNN; or None."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in _BEFORE_BFLOAT16:
        return f"needs AVX512_BF16, ONEDNN_MAX_CPU_ISA={limit} keeps oneDNN from it"
    if envs.VLLM_CPU_ISA not in (None, "avx512_bf16"):
        return f"needs AVX512_BF16, VLLM_CPU_ISA={envs.VLLM_CPU_ISA} keeps the kernels from it"
    try:
        NativeCpuKernels.load("avx512_bf16")
    except (NativeKernelsUnavailable, ValueError) as error:
        return f"needs AVX512_BF16: {error}"
    return None
