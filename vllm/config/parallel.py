"""ParallelConfig: the distribution of the model over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm import envs
from vllm.utils.checked import config
from vllm.utils.math_utils import divisors
from vllm.utils.options import DERIVED, WITHOUT_EFFECT, Option
from vllm.utils.ray_cluster import RayPlace
from vllm.utils.text import one_of
from vllm.utils.token_spread import WHOLE, TokenSpread

ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive")
RankCount = Annotated[int, Field(ge=1, le=1 << 16)]
"""More processes than that are a slip, and lists of their numbers would not fit into memory."""
BACKENDS = (None, "uni", "mp", "ray", "external_launcher")


@config()
class ParallelConfig:
    """Sizes of the groups of ranks."""

    tensor_parallel_size: Annotated[RankCount, Option(short_flag="-tp")] = 1
    """Number of ranks that share every layer, each a process (on CPUs)."""
    pipeline_parallel_size: Annotated[RankCount, Option(short_flag="-pp")] = 1
    """Number of stages, each with a part of the layers, in one or more processes (on CPUs)."""
    data_parallel_size: Annotated[RankCount, Option(short_flag="-dp")] = 1
    """Number of engines that serve side by side, each a process (on CPUs)."""
    data_parallel_size_local: Annotated[int | None, Field(ge=0), Option(short_flag="-dpl")] = None
    """Number of them on this machine; the others are those of `vllm serve --headless` on other
    machines. 0: only the front end is here. Default: all."""
    data_parallel_start_rank: Annotated[int, Field(ge=0), Option(short_flag="-dpr")] = 0
    """Number of this machine's first engine, with `--headless` or data_parallel_hybrid_lb."""
    data_parallel_address: Annotated[str, Option(short_flag="-dpa")] = "127.0.0.1"
    """Address of the front end in a private network, for engines on other machines."""
    data_parallel_rpc_port: Annotated[int, Field(ge=1, le=65535), Option(short_flag="-dpp")] = 29550
    """Port at which it waits for them; they use further ports, which are free."""
    external_rank: Annotated[
        int | None, Field(ge=0), Option(name="data_parallel_rank", short_flag="-dpn")
    ] = None
    """Number of this server's only engine; the others have servers of their own, and somebody else
    shares the requests out. Sets data_parallel_external_lb."""
    data_parallel_external_lb: Annotated[bool, Option(short_flag="-dpe")] = False
    """Serve one of the engines, data_parallel_rank, here."""
    data_parallel_hybrid_lb: Annotated[bool, Option(short_flag="-dph")] = False
    """Serve this machine's engines alone here: data_parallel_size_local from
    data_parallel_start_rank on. Other machines have servers of their own."""
    data_parallel_balancing: Literal["least-loaded", "prefix"] = "least-loaded"
    """Engine that gets a request: the one with the fewest; or the one that got the longest prefix
    of its prompt before, unless that has more than twice as many requests as another, and 4."""
    data_parallel_backend: Annotated[str, Option(short_flag="-dpb", supported=("mp",))] = "mp"
    """Way of starting the engines: "mp", by this package's own processes."""
    decode_context_parallel_size: Annotated[RankCount, Option(short_flag="-dcp")] = 1
    """Number of the tensor_parallel_size ranks over which cached tokens are spread, instead of a
    copy on each; it divides the number of ranks that have the same key/value head."""
    prefill_context_parallel_size: Annotated[RankCount, Option(short_flag="-pcp")] = 1
    """Number of ranks with the same weights that share the tokens of a step and spread cached
    tokens; each is a process (on CPUs)."""
    cp_kv_cache_interleave_size: RankCount = 1
    """Number of consecutive tokens on one rank of those that spread them
    (decode_context_parallel_size, prefill_context_parallel_size); it divides the tokens that a
    rank has of a block (block_size)."""
    enable_expert_parallel: Annotated[bool, Option(short_flag="-ep")] = False
    """Give each rank whole experts instead of a slice of each: some of those of its engine's
    tensor_parallel_size ranks or, with data_parallel_size, of those of all engines."""
    all2all_backend: Annotated[str, Option(supported=ALL2ALL_BACKENDS)] = ALL2ALL_BACKENDS[0]
    """Way in which tokens get to the experts of other engines: gather those of all engines and
    return outputs. Both names mean this way."""
    enable_sequence_parallel: bool = False
    """Let each rank of tensor_parallel_size compute norms and sums with the residual stream for
    a share of a step's tokens instead of all of them; no bit changes."""
    distributed_executor_backend: Annotated[str | None, Option(supported=BACKENDS)] = None
    """Way of starting the workers: "uni", one in the engine's process; "mp", the first there and
    each of the others in its own; "ray", the same, and the others are actors of a Ray cluster;
    "external_launcher", one in each process that torchrun started, all of which make the same calls
    of `LLM`. Default: "uni" for one rank, else "mp"."""
    nnodes: RankCount = 1
    """Number of machines over which "mp" spreads the ranks. Each but the first runs `vllm serve
    --headless`."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """This machine's number among the `nnodes`; 0 has the engine."""
    master_addr: str = "127.0.0.1"
    """Address of node 0 in a private network."""
    master_port: Annotated[int, Field(ge=1, le=65535)] = 29501
    """Port at which node 0 waits for the others; ranks use further ports, which are free."""
    distributed_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for which ranks wait for each other; after it the engine is dead."""
    disable_custom_all_reduce: Annotated[bool, WITHOUT_EFFECT] = False
    """Accepted and without effect: there is one way to sum over ranks."""
    worker_extension_cls: str = ""
    """A class whose methods workers get, as "module.Class", for `collective_rpc`."""
    data_parallel_rank: Annotated[int, Field(ge=0), DERIVED] = 0
    """This engine's number among the ``data_parallel_size``."""
    engine_files: Annotated[tuple[str, ...], DERIVED] = ()
    """Paths of the memory by which engines reach each other's experts; empty: they share none."""
    rank: Annotated[int, Field(ge=0), DERIVED] = 0
    """This process's number among the ``world_size`` ranks of the engine."""
    machine_rank: Annotated[int | None, DERIVED] = None
    """This process's number among those of all engines on this machine; None: all are on it."""
    ranks_on_machine: Annotated[int | None, DERIVED] = None
    """Number of these processes."""

    num_cpus: Annotated[int | None, DERIVED] = None
    """CPUs that a cluster reserves for each rank; None: ranks share those of the machine."""
    ray_place: Annotated[RayPlace | None, DERIVED] = None
    """The Ray cluster of the process that makes the config, if the engine is in another."""

    is_offline_engine: Annotated[bool, DERIVED] = False
    """True if a program makes the `LLM` of each engine (VLLM_DP_RANK, VLLM_DP_SIZE)."""

    def __post_init__(self) -> None:
        self._take_offline_place()
        if self.distributed_executor_backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' has one rank, but {self.world_size} are asked "
                "for (tensor_parallel_size, prefill_context_parallel_size, "
                'pipeline_parallel_size); use "mp", or leave the option out'
            )
        ranks, size = self.tensor_parallel_size, self.decode_context_parallel_size
        if ranks % size:
            raise ValueError(
                f"decode_context_parallel_size={size} does not divide tensor_parallel_size="
                f"{ranks}; use {one_of(divisors(ranks))}"
            )
        self._check_nodes()
        self._take_external_place()
        self._check_engines()

    @property
    def token_spread(self) -> TokenSpread:
        """The ranks of one stage that have the tokens of a sequence, if its layers spread them."""
        size = self.decode_context_parallel_size * self.prefill_context_parallel_size
        return TokenSpread(size, self.cp_kv_cache_interleave_size) if size > 1 else WHOLE

    @property
    def shares_tokens(self) -> bool:
        """True if the ranks of a stage share the tokens, at least between branches."""
        shares_between = self.enable_sequence_parallel and self.tensor_parallel_size > 1
        return shares_between or self.prefill_context_parallel_size > 1

    @property
    def option_to_share(self) -> str:
        """The option because of which ranks share tokens, with its value."""
        if (size := self.prefill_context_parallel_size) > 1:
            return f"prefill_context_parallel_size={size}"
        return f"enable_sequence_parallel={self.enable_sequence_parallel}"

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of one pipeline stage; they follow each other. Tensor-parallel groups lie
        one after another in it."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    def _take_offline_place(self) -> None:
        """Set the engine's number from the environment, if that has one."""
        size, rank, local = envs.VLLM_DP_SIZE, envs.VLLM_DP_RANK, envs.VLLM_DP_RANK_LOCAL
        given = f"VLLM_DP_RANK={rank}, VLLM_DP_RANK_LOCAL={local}, VLLM_DP_SIZE={size}"
        if rank >= size or (local is not None and local > rank):
            raise ValueError(
                f"{given}: ranks count from 0 to VLLM_DP_SIZE - 1, the local one is not larger"
            )
        if size == 1:
            return
        if self.data_parallel_size not in (1, size):
            raise ValueError(
                f"{given}: data_parallel_size={self.data_parallel_size} has to be the same, or be "
                "left out"
            )
        self.data_parallel_size, self.data_parallel_rank = size, rank
        self.is_offline_engine = True

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank={self.node_rank}: has to be below nnodes={self.nnodes}")
        reason = ""
        if self.world_size % self.nnodes:
            reason = f"{self.sizes_in_words(' times ')} is not a multiple of it"
        elif self.nnodes > 1 and self.distributed_executor_backend not in (None, "mp"):
            backend = self.distributed_executor_backend
            reason = f"distributed_executor_backend={backend!r} starts no nodes; use 'mp'"
        elif self.nnodes > 1 and self.data_parallel_size > 1 and self.external_rank is None:
            reason = (
                f"data_parallel_size={self.data_parallel_size}: nodes share one engine; start a "
                "server for each engine, with nodes of its own: data_parallel_rank on all nodes of "
                "an engine, and a master_addr and master_port for each"
            )
        if reason:
            raise ValueError(f"nnodes={self.nnodes}: {reason}")

    def _take_external_place(self) -> None:
        rank, size = self.external_rank, self.data_parallel_size
        if rank is None:
            if self.data_parallel_external_lb:
                raise ValueError("data_parallel_external_lb needs data_parallel_rank")
            return
        if rank >= size:
            raise ValueError(
                f"data_parallel_rank={rank}: has to be below data_parallel_size={size}"
            )
        self.data_parallel_external_lb, self.data_parallel_rank = True, rank

    def _check_engines(self) -> None:
        """Refuse contradictions about the engines of this machine."""
        size, local = self.data_parallel_size, self.data_parallel_size_local
        start, ways = self.data_parallel_start_rank, ("external_lb", "hybrid_lb")
        given = f"data_parallel_start_rank={start}, data_parallel_size_local={local}"
        used = [f"data_parallel_{way}" for way in ways if getattr(self, f"data_parallel_{way}")]
        problem = ""
        if len(used) > 1:
            problem = f"{' and '.join(used)}: use one of them"
        elif self.data_parallel_external_lb and (start or local not in (None, 1)):
            problem = f"{given} with data_parallel_rank, which is one engine; leave them out"
        elif self.data_parallel_hybrid_lb and not local:
            problem = f"data_parallel_hybrid_lb needs data_parallel_size_local; {given}"
        elif start + (1 if local is None else local) > size:
            problem = f"{given}: there are data_parallel_size={size} engines"
        elif start and local is None:
            problem = f"{given}: name the number of engines of this machine"
        elif self.is_offline_engine and (used or start or local is not None):
            problem = f"VLLM_DP_SIZE={size} with {', '.join(used) or given}: use one of them"
        if problem:
            raise ValueError(problem)

    @property
    def engines_here(self) -> range:
        """Numbers of the engines on this machine."""
        if self.data_parallel_external_lb:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        local, start = self.data_parallel_size_local, self.data_parallel_start_rank
        return range(start, start + (self.data_parallel_size if local is None else local))

    @property
    def engines_served(self) -> range:
        """Numbers of the engines of one front end, on this machine and on others."""
        has_others = self.data_parallel_external_lb or self.data_parallel_hybrid_lb
        return self.engines_here if has_others else range(self.data_parallel_size)

    def ranks_of_node(self, node: int) -> list[int]:
        """Return the ranks of a node. The first node has the last stages, and so the driver."""
        size, num_ranks = self.ranks_per_stage, self.world_size // self.nnodes
        stages = reversed(range(self.pipeline_parallel_size))
        ranks = [stage * size + rank for stage in stages for rank in range(size)]
        return ranks[node * num_ranks : (node + 1) * num_ranks]

    @property
    def stage(self) -> int:
        """Number of this rank's pipeline stage."""
        return self.rank // self.ranks_per_stage % self.pipeline_parallel_size

    @property
    def driver_rank(self) -> int:
        """The rank in the engine's process, which keeps rows and samples: the first of the last
        stage."""
        return (self.pipeline_parallel_size - 1) * self.ranks_per_stage

    @property
    def is_driver(self) -> bool:
        return self.rank == self.driver_rank

    @property
    def place_on_machine(self) -> tuple[int, int]:
        """This process's number among those of all engines on this machine, and their number."""
        if self.machine_rank is not None and self.ranks_on_machine is not None:
            return self.machine_rank, self.ranks_on_machine
        if self.nnodes > 1:
            own = self.ranks_of_node(self.node_rank)
            return own.index(self.rank), len(own)
        engine = self.data_parallel_rank - self.engines_here.start
        if self.is_offline_engine and envs.VLLM_DP_RANK_LOCAL is not None:
            engine = envs.VLLM_DP_RANK_LOCAL
        rank = engine * self.world_size + self.rank
        return rank, len(self.engines_here) * self.world_size

    @property
    def uses_ray(self) -> bool:
        """True if ranks are actors of a Ray cluster."""
        return self.distributed_executor_backend == "ray" and self.world_size > 1

    @property
    def ranks_here(self) -> list[int]:
        """Ranks whose processes the engine's own starts, and its own."""
        return [self.driver_rank] if self.uses_ray else self.ranks_of_node(0)

    @property
    def is_external(self) -> bool:
        """True if somebody else starts the processes, each with an engine of its own."""
        return self.distributed_executor_backend == "external_launcher"

    @property
    def world_size(self) -> int:
        """Number of ranks of one engine (data parallelism means several engines)."""
        return self.ranks_per_stage * self.pipeline_parallel_size

    def sizes_in_words(self, between: str) -> str:
        """Name the options whose product is the number of ranks, the third only if it is used."""
        names = ["tensor_parallel_size", "pipeline_parallel_size"]
        if self.prefill_context_parallel_size > 1:
            names.append("prefill_context_parallel_size")
        return between.join(f"{name}={getattr(self, name)}" for name in names)
