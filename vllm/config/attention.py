"""AttentionConfig: which kernels attend."""

from __future__ import annotations

from typing import Literal

from vllm.config.utils import config


@config()
class AttentionConfig:
    """How attention is computed."""

    backend: Literal["FLASHINFER", "TRITON_ATTN", "CPU_ATTN"] | None = None
    """Attention kernels. None: VLLM_ATTENTION_BACKEND, else the device's preferred ones."""
