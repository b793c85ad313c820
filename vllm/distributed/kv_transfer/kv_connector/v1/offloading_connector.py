"""The connector that keeps blocks in host memory, to load them instead of computing them again.

In each step it copies the blocks that the step fills to the host, with kept states of recurrent
layers and rows of hidden states. A prompt whose beginning was computed before loads that part,
also if the pool has overwritten it since.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Strict

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import (
    EndedSaves,
    PrefixConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    PrefixTracker,
    SavedContent,
)
from vllm.utils.checked import ABOVE_0, FINITE, at_least, config
from vllm.v1.cache_kinds.base import KVCacheReferences
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.kv_offload.block_copies import BlockCopies, BlockCopy
from vllm.v1.kv_offload.eviction import find_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_Count = Annotated[int, Strict(), at_least(1)] | None


@config("kv_connector_extra_config", frozen=True)
class OffloadingOptions:
    """The checked ``kv_connector_extra_config`` of the offloading connector."""

    cpu_bytes_to_use: Annotated[float, Strict(), ABOVE_0, FINITE] | None = None
    """Bytes of host memory, allocated at the start; ``kv_offloading_size`` gives them in GiB.
    Several ranks share them."""
    num_cpu_blocks: _Count = None
    """Number of offloaded blocks to keep, instead of a number of bytes."""
    block_size: _Count = None
    """Tokens of an offloaded block, a multiple of the tokens per block of each group. They are kept
    and overwritten together, and prompts are found up to a multiple of it. In a model with
    recurrent layers prompts are found up to the states that are kept. None: one block each."""
    blocks_per_chunk: _Count = None
    """Blocks of each group that are kept and overwritten together, instead of ``block_size``."""
    eviction_policy: str = "lru"
    """"lru" overwrites the least recently used blocks first. With "arc", prompts that are seen once
    do not evict those that are seen again."""
    spec_name: Literal["CPUOffloadingSpec"] = "CPUOffloadingSpec"
    """Accepted because configurations of upstream may name this class; it has no effect."""

    def __post_init__(self) -> None:
        find_policy(self.eviction_policy)
        self._check_one("cpu_bytes_to_use", "num_cpu_blocks")
        self._check_one("block_size", "blocks_per_chunk")
        if self.cpu_bytes_to_use is None and self.num_cpu_blocks is None:
            raise ValueError(
                "kv_connector_extra_config.cpu_bytes_to_use is missing; give it, "
                "kv_offloading_size or num_cpu_blocks"
            )

    def _check_one(self, one: str, other: str) -> None:
        values = dataclasses.asdict(self)
        if values[one] is not None and values[other] is not None:
            raise ValueError(
                f"{one}={values[one]!r} and {other}={values[other]!r} say the same; give one of "
                "them"
            )


class Chunks(NamedTuple):
    """The sizes of chunks, whose blocks are kept and overwritten together."""

    blocks: list[int]
    """Blocks of a chunk, by group."""
    tokens_per_hit: int
    keeps_parts: bool
    """True if chunks that never became full can be found."""


class OffloadingConnector(PrefixConnector[BlockCopy, BlockCopy]):
    """Copies blocks of every group between the pool and host memory."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None, "made by the engine, which has a plan"
        options = OffloadingOptions(**self._kv_transfer_config.kv_connector_extra_config)
        chunks = plan_chunks(options, kv_cache_config)
        self._num_ranks = vllm_config.parallel_config.world_size
        block_bytes = kv_cache_config.block_bytes * self._num_ranks
        self._num_blocks = num_host_blocks(options, block_bytes, chunks)
        if role is KVConnectorRole.SCHEDULER:
            policy = find_policy(options.eviction_policy)
            self._ranks_ended: Counter[int] = Counter()
            self._host = HostBlocks(self._num_blocks, policy, chunks.blocks, chunks.keeps_parts)
            self._tracker = PrefixTracker(
                vllm_config, kv_cache_config, self._host.index, chunks.tokens_per_hit
            )

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        OffloadingOptions(**vllm_config.kv_transfer_config.kv_connector_extra_config)

    # Worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        advice = "lower cpu_bytes_to_use (kv_offloading_size) or num_cpu_blocks"
        self._copies = BlockCopies(self._pool, self._num_blocks, advice)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copies.end_saves()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._copies.load(self._step().loads)

    def wait_for_save(self) -> None:
        """Begin the copies without waiting: the next step runs after them."""
        step = self._step()
        self._copies.save(step.saves)
        self._ended = EndedSaves(Counter([step.step_number]))

    # Scheduler side

    def begin(self, request: Request, load: Load) -> list[BlockCopy]:
        self._host.begin(request.request_id, load)
        return load.copies

    def place(self, step_number: int, saves: list[SavedContent]) -> list[BlockCopy]:
        return self._host.place(step_number, saves)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = connector_output.kv_connector_worker_meta
        if not isinstance(ended, EndedSaves):
            return
        counts = self._ranks_ended
        counts.update(ended.ranks_of_steps)
        for step_number in sorted(n for n, ranks in counts.items() if ranks == self._num_ranks):
            self._host.confirm(step_number)
            for earlier in [n for n in counts if n <= step_number]:
                del counts[earlier]  # some rank never saved what is left

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._host.end(request.request_id)
        return super().request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        self._host.forget_all()
        return True


def plan_chunks(options: OffloadingOptions, plan: KVCacheConfig) -> Chunks:
    """Plan the sizes of chunks. ValueError: ``block_size`` is not a multiple of the tokens that a
    block of some group holds."""
    sizes = [
        None if group.kv_cache_spec.is_recurrent else group.kv_cache_spec.block_size
        for group in plan.kv_cache_groups
    ]
    smallest = math.lcm(*(size for size in sizes if size))
    tokens = options.block_size
    if tokens is not None and tokens % smallest:
        raise ValueError(
            f"block_size={tokens} is not a multiple of the tokens that blocks hold "
            f"({', '.join(str(size) for size in sizes if size)}); use a multiple of {smallest}, or "
            "blocks_per_chunk"
        )
    if tokens is None:
        blocks = [options.blocks_per_chunk or 1 if size else 1 for size in sizes]
    else:
        blocks = [tokens // size if size else 1 for size in sizes]
    if tokens is None or plan.recurrent_group_ids:
        return Chunks(blocks, HASH_TOKENS, keeps_parts=True)
    return Chunks(blocks, math.lcm(tokens, HASH_TOKENS), keeps_parts=False)


def num_host_blocks(options: OffloadingOptions, block_bytes: int, chunks: Chunks) -> int:
    """Return the number of host blocks, each as large as the pool's, with the null block.
    block_bytes: those of a block on all ranks. ValueError: too few."""
    if options.num_cpu_blocks is not None:
        return 1 + options.num_cpu_blocks * max(chunks.blocks)
    least = 1 + max(chunks.blocks)
    assert options.cpu_bytes_to_use is not None
    count = int(options.cpu_bytes_to_use) // block_bytes
    if count < least:
        raise ValueError(
            f"cpu_bytes_to_use={options.cpu_bytes_to_use:.0f} cannot hold an offloaded block of "
            f"{max(chunks.blocks)} x {block_bytes} bytes; use at least {least * block_bytes}"
        )
    return count
