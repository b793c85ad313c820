"""SchedulerConfig: how much runs in a step, and in which order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm.platforms.interface import Platform
from vllm.utils.checked import UNSET, Fillable, config, is_unset
from vllm.utils.options import DERIVED, Option


@config()
class SchedulerConfig:
    """Token budget, number of requests, policy."""

    max_num_batched_tokens: Annotated[int, Field(ge=1), Fillable] = UNSET
    """Tokens of one step. None: the platform's (on a CPU 4096, 2048 of a server; on CUDA 8192, or
    16384 where no server runs a model of hidden size 2048 or less), or max_model_len without
    chunked prefill."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    """Requests that run at the same time."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit in the rest of a step."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one prompt in a step; 0: no such limit."""
    policy: Annotated[Literal["fcfs", "priority"], Option("scheduling_policy")] = "fcfs"
    """Order of the waiting requests: of arrival, or by priority (lower first)."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Give all layers one block table. None: only when the KV connector cannot do otherwise;
    VllmConfig then fills in the answer."""
    async_scheduling: bool | None = None
    """Plan a step while the one before it runs. None: on devices that work beside the CPU;
    VllmConfig then fills in the answer."""
    max_model_len: Annotated[int, Field(ge=1), DERIVED] = 8192
    """Copy of model_config.max_model_len."""

    @property
    def max_steps_under_way(self) -> int:
        """Most steps that have started and not ended."""
        return 2 if self.async_scheduling else 1

    @property
    def max_tokens_under_way(self) -> int:
        """Most tokens of steps that have not ended."""
        return self.max_num_batched_tokens * self.max_steps_under_way

    def __post_init__(self) -> None:
        if is_unset(self.max_num_batched_tokens):
            self.max_num_batched_tokens = Platform.default_max_num_batched_tokens_of_servers
            if not self.enable_chunked_prefill:
                self.max_num_batched_tokens = max(self.max_num_batched_tokens, self.max_model_len)
        elif not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than "
                f"max_model_len={self.max_model_len} while chunked prefill is off, so long prompts "
                f"could never run; use at least {self.max_model_len}, a smaller max_model_len, or "
                "enable_chunked_prefill=True"
            )
