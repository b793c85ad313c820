"""LoRAConfig: adapters that requests may choose."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.utils.checked import config


@config()
class LoRAConfig:
    """Low-rank adapters (LoRA) in PEFT's format."""

    enable_lora: bool = False
    """Let requests choose adapters (lora_request)."""
    max_lora_rank: Annotated[int, Field(ge=1)] = 16
    """Largest rank of an adapter."""
    max_loras: Annotated[int, Field(ge=1)] = 8
    """Adapters that stay in memory for later requests; the least recently used leave first. Any
    number may run in one batch."""
