"""ParallelConfig: the distribution of the model over processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.utils.checked import config
from vllm.utils.math_utils import divisors
from vllm.utils.options import DERIVED, Option
from vllm.utils.text import one_of
from vllm.utils.token_spread import WHOLE, TokenSpread


@config()
class ParallelConfig:
    """Sizes of the groups of ranks."""

    tensor_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-tp")] = 1
    """Number of ranks that share every layer, each a process (on CPUs)."""
    pipeline_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-pp")] = 1
    """Number of stages, each with a part of the layers, in one or more processes (on CPUs)."""
    data_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-dp")] = 1
    """Number of engines that serve side by side, each a process (on CPUs)."""
    decode_context_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-dcp")] = 1
    """Number of the tensor_parallel_size ranks over which cached tokens are spread, instead of a
    copy on each; it divides the number of ranks that have the same key/value head."""
    prefill_context_parallel_size: Annotated[int, Field(ge=1), Option(short_flag="-pcp")] = 1
    """Number of ranks over which the tokens of a prompt are spread. Only 1 is supported."""
    cp_kv_cache_interleave_size: Annotated[int, Field(ge=1)] = 1
    """Number of consecutive tokens on one rank of decode_context_parallel_size; it divides the
    tokens that a rank has of a block (block_size)."""
    enable_expert_parallel: Annotated[bool, Option(short_flag="-ep")] = False
    """Give each rank of tensor_parallel_size whole experts instead of a slice of each."""
    distributed_executor_backend: Annotated[str | None, Option(supported=(None, "uni", "mp"))] = (
        None
    )
    """Way of starting the workers: "uni", one in the engine's process, or "mp", the first there and
    each of the others in its own. Default: "uni" for one rank, else "mp"."""
    distributed_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for which ranks wait for each other; after it the engine is dead."""
    disable_custom_all_reduce: bool = False
    """Accepted and without effect: there is one way to sum over ranks."""
    worker_extension_cls: str = ""
    """A class whose methods workers get, as "module.Class", for `collective_rpc`."""
    data_parallel_rank: Annotated[int, Field(ge=0), DERIVED] = 0
    """This engine's number among the ``data_parallel_size``."""
    rank: Annotated[int, Field(ge=0), DERIVED] = 0
    """This process's number among the ``world_size`` ranks of the engine."""

    def __post_init__(self) -> None:
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' has one rank, but {self.world_size} are asked "
                'for (tensor_parallel_size, pipeline_parallel_size); use "mp", or leave the '
                "option out"
            )
        ranks, size = self.tensor_parallel_size, self.decode_context_parallel_size
        if ranks % size:
            raise ValueError(
                f"decode_context_parallel_size={size} does not divide tensor_parallel_size="
                f"{ranks}; use {one_of(divisors(ranks))}"
            )

    @property
    def token_spread(self) -> TokenSpread:
        """The ranks of one stage that have the tokens of a sequence, if its layers spread them."""
        size = self.decode_context_parallel_size
        return TokenSpread(size, self.cp_kv_cache_interleave_size) if size > 1 else WHOLE

    @property
    def stage(self) -> int:
        """Number of this rank's pipeline stage. The ranks of a stage follow each other."""
        return self.rank // self.tensor_parallel_size % self.pipeline_parallel_size

    @property
    def driver_rank(self) -> int:
        """The rank in the engine's process, which keeps rows and samples: the first of the last
        stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size

    @property
    def is_driver(self) -> bool:
        return self.rank == self.driver_rank

    @property
    def world_size(self) -> int:
        """Number of ranks of one engine (data parallelism means several engines)."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
        )
