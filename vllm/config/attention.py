"""AttentionConfig: the choice of attention kernels."""

from __future__ import annotations

from typing import Annotated

from vllm.envs import AttentionBackend
from vllm.utils.checked import config
from vllm.utils.options import Option


@config()
class AttentionConfig:
    """The attention kernels."""

    backend: Annotated[AttentionBackend | None, Option("attention_backend")] = None
    """Attention kernels. Default: VLLM_ATTENTION_BACKEND, else the device's preferred ones."""
