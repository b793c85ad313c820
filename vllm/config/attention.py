"""AttentionConfig: which kernels attend."""

from __future__ import annotations

from typing import Annotated

from vllm.envs import AttentionBackend
from vllm.utils.checked import config
from vllm.utils.options import Option


@config()
class AttentionConfig:
    """How attention is computed."""

    backend: Annotated[AttentionBackend | None, Option("attention_backend")] = None
    """Attention kernels. None: VLLM_ATTENTION_BACKEND, else the device's preferred ones."""
