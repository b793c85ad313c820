"""The pool as bytes under the names of upstream's releases from 0.19 on.

There an entry of a group stands for one tensor of which a block's row is copied from its first
byte. Here all layers of a group lie in one row, so a group has one such entry.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.cache_kinds.base import KVCacheReferences, KVCacheTensorReference

CanonicalKVCacheTensor = KVCacheTensorReference


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
