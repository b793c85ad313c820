"""Offloading to places of others: what a spec is, as in upstream 0.22.

A spec gives the scheduler a manager, which knows what is stored, and the worker handlers, which
move it. Names and signatures are upstream's; ``spec_connector`` calls them. The pool is shown as
``CanonicalKVCaches``: there an entry of a group stands for one tensor of which a block's row is
copied from its first byte. Here all layers of a group lie in one row, so a group has one entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NewType

import numpy as np

from vllm.v1.cache_kinds.base import KVCacheConfig, KVCacheReferences, KVCacheTensorReference
from vllm.v1.core.prefix_hash import HASH_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler

CanonicalKVCacheTensor = KVCacheTensorReference
OffloadKey = NewType("OffloadKey", bytes)
"""One block of one group: what its prefix hashes to, and the group."""
_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """The key of a group's block."""
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The part of a key that is the block's."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The part of a key that is the group's."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


@dataclass
class ReqContext:
    """For which request a manager is asked."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None


class LoadStoreSpec(ABC):
    """Where blocks are, in the terms of whoever moves them."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name of the place."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks by their numbers."""

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int64)

    def __repr__(self) -> str:
        return repr(self.block_ids)


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the pool, group by group.

    ``group_sizes[i]`` of them belong to group i, and ``block_indices[i]`` is the position in the
    request's table of the first.
    """

    def __init__(
        self, block_ids: list[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        assert sum(group_sizes) == len(block_ids) and len(group_sizes) == len(block_indices)
        self.group_sizes = group_sizes
        self.block_indices = block_indices

    @staticmethod
    def medium() -> str:
        return "GPU"


@dataclass
class PrepareStoreOutput:
    """Which blocks are to be stored, where, and which went for them."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass
class OffloadingEvent:
    """Blocks were stored, or removed."""

    keys: list[OffloadKey]
    medium: str
    removed: bool


class OffloadingManager(ABC):
    """Scheduler half of a spec: what is stored."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Whether a block can be loaded; None: not known yet, the request waits."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Where these blocks are, in this order; they stay until :meth:`complete_load`."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """The blocks were found."""

    def complete_load(  # noqa: B027
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> None:
        """The blocks were loaded."""

    @abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Which of these blocks go where; None: none of them. They stay until
        :meth:`complete_store`."""

    def complete_store(  # noqa: B027
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """The blocks are stored and can be found; or they are not, and are forgotten."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What happened since the last call."""
        return ()

    def shutdown(self) -> None:  # noqa: B027
        """Let go of everything."""


class OffloadingSpec(ABC):
    """A place for blocks; made once for the scheduler and once for the worker.

    ``extra_config`` is ``kv_connector_extra_config``, options of the spec's own among it.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.hash_block_size = HASH_TOKENS
        self.gpu_block_size = tuple(
            group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups
        )
        self.block_size_factor = 1

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """What the scheduler asks."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """``(from, to, handler)`` of each way."""


class CanonicalKVCacheRef(NamedTuple):
    """What of the rows of one tensor belongs to a group."""

    tensor_idx: int
    page_size_bytes: int
    """Bytes of a row, from its first, that hold data."""


class CanonicalKVCaches(NamedTuple):
    """The tensors, and for each group what of them is its own."""

    tensors: list[KVCacheTensorReference]
    group_data_refs: list[list[CanonicalKVCacheRef]]


def canonical_kv_caches(references: KVCacheReferences) -> CanonicalKVCaches:
    """The same references, one entry a group and tensor."""
    groups = []
    for group in references.group_data_refs:
        ends: dict[int, int] = {}
        for reference in group:
            start, length = reference.runs[-1]
            ends[reference.tensor_idx] = max(ends.get(reference.tensor_idx, 0), start + length)
        groups.append([CanonicalKVCacheRef(index, end) for index, end in ends.items()])
    return CanonicalKVCaches(references.tensors, groups)
