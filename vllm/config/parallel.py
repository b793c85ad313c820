"""ParallelConfig: how the model is spread over processes."""

from __future__ import annotations

from pydantic import Field

from vllm.config.utils import config


@config()
class ParallelConfig:
    """Sizes of the groups of ranks."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages, each with a part of the layers."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Engines that serve side by side."""
    decode_context_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which the tokens of a sequence are spread while decoding."""
    prefill_context_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which the tokens of a sequence are spread while prefilling."""
    enable_expert_parallel: bool = False
    """Spread the experts of a layer over the ranks instead of cutting each."""
    distributed_executor_backend: str | None = None
    """How the workers are started. None: one worker in this process, "uni"."""
    rank: int = Field(default=0, ge=0)
    """This process's number among the ``world_size`` ranks of the engine."""

    @property
    def world_size(self) -> int:
        """Ranks of one engine (data parallelism is a number of engines)."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
        )
