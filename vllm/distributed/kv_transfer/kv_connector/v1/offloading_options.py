"""Options of the offloading connector, and what they come to for a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.utils import check_options
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.kv_offload.eviction import find_policy

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

BUILT_IN = "CPUOffloadingSpec"


@dataclasses.dataclass(frozen=True)
class OffloadingOptions:
    """What ``kv_connector_extra_config`` says."""

    cpu_bytes_to_use: int | float | None = None
    """Bytes of host memory, taken at the start; ``kv_offloading_size`` gives them in GiB."""
    num_cpu_blocks: int | None = None
    """In the place of them: offloaded blocks that are kept."""
    block_size: int | None = None
    """Tokens of an offloaded block, a multiple of the tokens a block of each group: they are kept
    and overwritten together, and prompts are found up to a multiple of it. Of a model with
    recurrent layers they are found up to the states that are kept. None: a block each."""
    blocks_per_chunk: int | None = None
    """In the place of it: blocks of each group that are kept and overwritten together."""
    eviction_policy: str = "lru"
    """"lru": what was not used for the longest time goes first. "arc": prompts that are seen once
    do not push out those that are seen again."""
    spec_name: str = BUILT_IN
    """The class that keeps the blocks: this one, or one of ``spec_module_path``, a subclass of
    ``vllm.v1.kv_offload.base.OffloadingSpec``, whose options are its own."""


class Chunks(NamedTuple):
    """What is kept together."""

    blocks: list[int]
    """Blocks of a chunk, by group."""
    tokens_per_hit: int
    keeps_parts: bool
    """Whether chunks that never became full can be found."""


def has_own_spec(options: Mapping[str, Any]) -> bool:
    """Whether a class of somebody else's keeps the blocks."""
    return bool(options.get("spec_name", BUILT_IN) != BUILT_IN)


def read_options(options: Mapping[str, Any]) -> OffloadingOptions:
    """Raises ValueError, with the option and what would work."""
    names = [field.name for field in dataclasses.fields(OffloadingOptions)]
    check_options("OffloadingConnector", options, names)
    read = OffloadingOptions(**options)
    find_policy(read.eviction_policy)
    for name in ("num_cpu_blocks", "block_size", "blocks_per_chunk"):
        value = options.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is not a positive number of blocks or tokens")
    size = read.cpu_bytes_to_use
    if read.num_cpu_blocks is None and (
        isinstance(size, bool) or not isinstance(size, int | float) or not size > 0
    ):
        raise ValueError(
            f"cpu_bytes_to_use={size!r} is not a number of bytes: give it, kv_offloading_size or "
            "num_cpu_blocks"
        )
    _check_one(read, "cpu_bytes_to_use", "num_cpu_blocks")
    _check_one(read, "block_size", "blocks_per_chunk")
    return read


def _check_one(options: OffloadingOptions, one: str, other: str) -> None:
    values = dataclasses.asdict(options)
    if values[one] is not None and values[other] is not None:
        raise ValueError(
            f"{one}={values[one]!r} and {other}={values[other]!r} say the same; give one of them"
        )


def plan_chunks(options: OffloadingOptions, config: KVCacheConfig) -> Chunks:
    """Raises ValueError: ``block_size`` is no multiple of what a block of some group holds."""
    sizes = [
        None if group.kv_cache_spec.is_recurrent else group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
    ]
    smallest = math.lcm(*(size for size in sizes if size))
    tokens = options.block_size
    if tokens is not None and tokens % smallest:
        raise ValueError(
            f"block_size={tokens} is no multiple of the tokens that blocks hold "
            f"({', '.join(str(size) for size in sizes if size)}); use a multiple of {smallest}, or "
            "blocks_per_chunk"
        )
    if tokens is None:
        blocks = [options.blocks_per_chunk or 1 if size else 1 for size in sizes]
    else:
        blocks = [tokens // size if size else 1 for size in sizes]
    if tokens is None or config.recurrent_group_ids:
        return Chunks(blocks, HASH_TOKENS, keeps_parts=True)
    return Chunks(blocks, math.lcm(tokens, HASH_TOKENS), keeps_parts=False)


def num_host_blocks(options: OffloadingOptions, block_bytes: int, chunks: Chunks) -> int:
    """Blocks as large as the pool's, the null block among them; ValueError: too few."""
    if options.num_cpu_blocks is not None:
        return 1 + options.num_cpu_blocks * max(chunks.blocks)
    least = 1 + max(chunks.blocks)
    assert options.cpu_bytes_to_use is not None
    count = int(options.cpu_bytes_to_use) // block_bytes
    if count < least:
        raise ValueError(
            f"cpu_bytes_to_use={options.cpu_bytes_to_use!r} holds no offloaded block of "
            f"{max(chunks.blocks)} x {block_bytes} bytes; use at least {least * block_bytes}"
        )
    return count
