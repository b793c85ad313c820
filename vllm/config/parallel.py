"""ParallelConfig: the distribution of the model over processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.utils.checked import config
from vllm.utils.options import DERIVED, Option

ONE_ONLY = Option(supported=(1,))


@config()
class ParallelConfig:
    """Sizes of the groups of ranks."""

    tensor_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-tp", supported=(1,))] = 1
    """Number of ranks that share every layer."""
    pipeline_parallel_size: Annotated[
        int, Field(ge=1), Option(short_flag="-pp", supported=(1,))
    ] = 1
    """Number of stages, each with a part of the layers."""
    data_parallel_size: Annotated[int, Field(ge=1), ONE_ONLY] = 1
    """Number of engines that serve side by side."""
    decode_context_parallel_size: Annotated[int, Field(ge=1), ONE_ONLY] = 1
    """Number of ranks over which the tokens of a sequence are spread while decoding."""
    prefill_context_parallel_size: Annotated[int, Field(ge=1), ONE_ONLY] = 1
    """Number of ranks over which the tokens of a sequence are spread while prefilling."""
    enable_expert_parallel: Annotated[bool, Option(supported=(False,))] = False
    """Spread the experts of a layer over the ranks instead of splitting each expert."""
    distributed_executor_backend: Annotated[str | None, Option(supported=(None, "uni"))] = None
    """Way of starting the workers. Default: "uni", one worker in this process."""
    worker_extension_cls: str = ""
    """A class whose methods workers get, as "module.Class", for `collective_rpc`."""
    rank: Annotated[int, Field(ge=0), DERIVED] = 0
    """This process's number among the ``world_size`` ranks of the engine."""

    @property
    def world_size(self) -> int:
        """Number of ranks of one engine (data parallelism means several engines)."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
        )
