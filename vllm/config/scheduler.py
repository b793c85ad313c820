"""SchedulerConfig: the size of a step, and the order of requests."""

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
    """Most tokens of one step. Default on a CPU: 4096, or 2048 in a server, or 512 with several
    pipeline stages. Default on CUDA: 8192, or 16384 outside a server if the model's hidden size is
    at most 2048. Default without chunked prefill: max_model_len, or 2048 if that is more."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    """Most requests that run at the same time."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit in the rest of a step."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one prompt in a step; 0: no limit."""
    policy: Annotated[Literal["fcfs", "priority"], Option("scheduling_policy")] = "fcfs"
    """Order of the waiting requests: by arrival (fcfs), or by priority, lower first."""
    disable_hybrid_kv_cache_manager: bool | None = None  # VllmConfig fills in the answer
    """Give all layers one block table. Default: only if the KV connector cannot handle several."""
    async_scheduling: bool | None = None  # VllmConfig fills in the answer
    """Plan a step while the one before it runs. Default: on devices that work beside the CPU."""
    max_model_len: Annotated[int, Field(ge=1), DERIVED] = 8192
    """Copy of model_config.max_model_len."""

    @property
    def max_steps_under_way(self) -> int:
        """Most steps that have started but not ended."""
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
