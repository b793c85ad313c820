"""The managers of all groups behind one object: a prefix hit is what all groups agree on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.cache_kinds.base import KVCacheConfig, RetentionLimits
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.core.single_type_kv_cache_manager import (
    GroupHit,
    RecurrentStateManager,
    TokenBlockManager,
)


class PrefixHit(NamedTuple):
    """The part of a prompt that every group has."""

    num_grains: int
    groups: tuple[GroupHit, ...]
    """One for each token manager, in its order."""
    snapshot: list[int]
    """The recurrent state at the end of the prefix; empty without recurrent layers."""

    @property
    def num_tokens(self) -> int:
        return self.num_grains * HASH_TOKENS

    @property
    def shared_blocks(self) -> set[int]:
        """Blocks that a request must hold to use the hit."""
        shared = {block for hit in self.groups for block in hit.blocks if block}
        shared.update(hit.partial for hit in self.groups if hit.partial is not None)
        return shared.union(self.snapshot)


class KVCacheCoordinator:
    """One manager per token group, and one for all recurrent groups."""

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        *,
        max_retained_hidden_blocks: int,
        max_retained_snapshots: int,
    ) -> None:
        self.num_groups = len(config.kv_cache_groups)
        self.recurrent = RecurrentStateManager(
            pool, config.recurrent_group_ids, max_retained_snapshots
        )
        limits = RetentionLimits(max_retained_hidden_blocks)
        self.token_managers = [
            group.kv_cache_spec.make_manager(pool, group_id, limits)
            for group_id, group in enumerate(config.kv_cache_groups)
            if not group.kv_cache_spec.is_recurrent
        ]
        keeps_all = TokenBlockManager.release_unneeded
        self.passing_managers = [
            one for one in self.token_managers if type(one).release_unneeded is not keeps_all
        ]
        """The managers that release blocks while a request runs."""

    @property
    def has_recurrent_state(self) -> bool:
        return bool(self.recurrent.group_ids)

    def longest_token_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The most grains, up to ``limit``, whose blocks every token group has."""
        return _agreed(self.token_managers, hashes, limit)

    def find_longest_hit(self, hashes: Sequence[bytes], limit: int) -> PrefixHit | None:
        """The longest prefix of at most ``limit`` grains that every group has."""
        recurrent = [self.recurrent] if self.has_recurrent_state else []
        num_grains = _agreed([*self.token_managers, *recurrent], hashes, limit)
        if num_grains == 0:
            return None
        groups = tuple(m.hit(hashes, num_grains) for m in self.token_managers)
        snapshot = self.recurrent.find_snapshot(hashes[num_grains - 1]) or []
        self.recurrent.note_found(hashes[num_grains - 1])
        return PrefixHit(num_grains, groups, snapshot)

    @property
    def tokens_per_snapshot(self) -> int:
        """Tokens whose blocks take as much of the pool as one recurrent state; 0 without either."""
        blocks_per_token = sum(1 / manager.tokens_per_block for manager in self.token_managers)
        return (
            math.ceil(len(self.recurrent.group_ids) / blocks_per_token) if blocks_per_token else 0
        )

    def holders(self) -> Counter[int]:
        """References to each block in the tables of requests."""
        held: Counter[int] = Counter()
        tables = [m.tables for m in self.token_managers] + [self.recurrent.tables]
        for group_tables in tables:
            for table in group_tables.values():
                held.update(table)
        return held


def _agreed(
    managers: Sequence[TokenBlockManager | RecurrentStateManager],
    hashes: Sequence[bytes],
    limit: int,
) -> int:
    """The most grains, up to ``limit``, that all managers have."""
    num_grains, before = limit, -1
    while num_grains != before:
        before = num_grains
        for manager in managers:
            if num_grains <= 0:
                return 0
            num_grains = manager.longest_hit(hashes, num_grains)
    return num_grains
