"""Block tables of one kind of group: the blocks that tokens need, and the meaning of a hit.

Positions of hits are counted in *grains* of ``HASH_TOKENS`` tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from vllm.utils import cdiv
from vllm.v1.core.block_pool import NULL_BLOCK, BlockKey, BlockPool
from vllm.v1.core.prefix_hash import HASH_TOKENS


class GroupHit(NamedTuple):
    """Blocks of one group that hold a prefix."""

    blocks: list[int]
    """Table entries of the blocks used as they are (0: not needed)."""
    partial: int | None
    """A block that is to be copied, because only its first part belongs to the prefix."""


class TokenBlockManager:
    """A group whose blocks hold ``tokens_per_block`` tokens each, in order."""

    def __init__(self, pool: BlockPool, group_id: int, tokens_per_block: int) -> None:
        self.pool = pool
        self.group_id = group_id
        self.tokens_per_block = tokens_per_block
        self.tables: dict[str, list[int]] = {}
        self._registered: dict[str, int] = {}  # grains made findable, by request

    def num_missing(
        self, request_id: str, num_tokens: int, *, num_found: int = 0, num_known: int = 0
    ) -> int:
        """Count the blocks to add so that ``num_tokens`` tokens have a place.

        num_found: table entries that a hit gives; num_known: tokens found or loaded, which
        need a place only if later tokens read them.
        """
        have = len(self.tables.get(request_id, ())) or num_found
        if num_known:
            have = max(have, self.first_needed(num_known))
        missing = cdiv(num_tokens, self.tokens_per_block) - have
        return missing if missing > 0 else 0

    def first_needed(self, num_known_tokens: int) -> int:
        """Return the first table position that tokens after ``num_known_tokens`` read."""
        return 0

    def extend(self, request_id: str, num_tokens: int, num_known: int = 0) -> list[int]:
        """Add the missing blocks; returns them."""
        table = self.tables.setdefault(request_id, [])
        if num_known:
            table += [NULL_BLOCK] * (self.first_needed(num_known) - len(table))
        missing = cdiv(num_tokens, self.tokens_per_block) - len(table)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        table += added
        return added

    def adopt(self, request_id: str, hit: GroupHit, num_grains: int) -> tuple[int, int] | None:
        """Start a table with a hit; returns (source, destination) of a copy if one is needed.

        The source is held, too, until the caller releases it after the copy.
        """
        assert request_id not in self.tables
        self.pool.acquire(b for b in hit.blocks if b != NULL_BLOCK)
        table = self.tables[request_id] = list(hit.blocks)
        self._registered[request_id] = num_grains
        if hit.partial is None:
            return None
        self.pool.acquire([hit.partial])
        (own,) = self.pool.allocate(1)
        table.append(own)
        return hit.partial, own

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Release blocks that no later token needs: none here, as every token is read again."""

    def forget_table(self, request_id: str) -> None:
        """Forget a table without releasing its blocks, which another manager holds."""
        self.tables.pop(request_id, None)
        self._registered.pop(request_id, None)

    def free(self, request_id: str) -> list[tuple[int, int]]:
        """Release everything; returns (end position, block) for each block."""
        self._registered.pop(request_id, None)
        table = self.tables.pop(request_id, [])
        self._let_go(request_id, table)
        return self._ends(table)

    def _let_go(self, request_id: str, blocks: list[int]) -> None:
        self.pool.release(blocks)

    def _ends(self, table: list[int]) -> list[tuple[int, int]]:
        return [(i * self.tokens_per_block, block) for i, block in enumerate(table, 1) if block]

    def register(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the content of the first ``num_tokens`` tokens findable."""
        table = self.tables[request_id]
        per_block = self.tokens_per_block
        first = self._registered.get(request_id, 0)
        last = num_tokens // HASH_TOKENS
        if last <= first:
            return
        register, group_id = self.pool.register, self.group_id
        for grain in range(first, last):
            digest, begin = hashes[grain], grain * HASH_TOKENS
            # The blocks that hold tokens of the grain.
            for index in range(begin // per_block, (begin + HASH_TOKENS - 1) // per_block + 1):
                block = table[index]
                if block != NULL_BLOCK:
                    register(block, (group_id, digest, index))
        self._registered[request_id] = last

    def _find_full(self, hashes: Sequence[bytes], index: int) -> int | None:
        """The block that holds all tokens of table position ``index``."""
        grain = cdiv((index + 1) * self.tokens_per_block, HASH_TOKENS)
        if grain > len(hashes):
            return None
        return self.pool.find((self.group_id, hashes[grain - 1], index))

    def _find_partial(self, hashes: Sequence[bytes], num_grains: int) -> int | None:
        """A block that holds the tokens up to the end of grain ``num_grains``.

        A block registered for a later position inside the same block has them as well.
        """
        index = num_grains * HASH_TOKENS // self.tokens_per_block
        last = min(cdiv((index + 1) * self.tokens_per_block, HASH_TOKENS), len(hashes))
        for grain in range(num_grains, last + 1):
            block = self.pool.find((self.group_id, hashes[grain - 1], index))
            if block is not None:
                return block
        return None

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The most grains, up to ``limit``, with all tokens here; so are all shorter prefixes."""
        per_block = self.tokens_per_block
        num_full = 0
        while num_full * per_block < limit * HASH_TOKENS and (
            self._find_full(hashes, num_full) is not None
        ):
            num_full += 1
        longest = min(limit, num_full * per_block // HASH_TOKENS)
        last_inside = ((num_full + 1) * per_block - 1) // HASH_TOKENS
        for grain in range(min(limit, last_inside), longest, -1):
            if self._find_partial(hashes, grain) is not None:
                return grain
        return longest

    def hit(self, hashes: Sequence[bytes], num_grains: int) -> GroupHit:
        """The blocks of a hit that :meth:`longest_hit` allows."""
        num_full, inside = divmod(num_grains * HASH_TOKENS, self.tokens_per_block)
        first = min(self.first_needed(num_grains * HASH_TOKENS), num_full)
        found = [self._find_full(hashes, index) for index in range(first, num_full)]
        partial = self._find_partial(hashes, num_grains) if inside else None
        assert None not in found
        assert not inside or partial is not None
        return GroupHit([NULL_BLOCK] * first + [b for b in found if b is not None], partial)


class _PassingBlockManager(TokenBlockManager):
    """Releases blocks while their request runs."""

    def __init__(self, pool: BlockPool, group_id: int, tokens_per_block: int) -> None:
        super().__init__(pool, group_id, tokens_per_block)
        self._num_released: dict[str, int] = {}  # table positions, by request

    def num_unneeded(self, num_computed_tokens: int) -> int:
        """Table positions that no later token needs."""
        return self.first_needed(num_computed_tokens)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        first = self._num_released.get(request_id, 0)
        last = self.num_unneeded(num_computed_tokens)
        if last > first:
            table = self.tables[request_id]
            self._let_go(request_id, table[first:last])
            table[first:last] = [NULL_BLOCK] * (last - first)
            self._num_released[request_id] = last

    def free(self, request_id: str) -> list[tuple[int, int]]:
        self._num_released.pop(request_id, None)
        return super().free(request_id)


class SlidingWindowManager(_PassingBlockManager):
    """Keeps only the last ``window - 1`` tokens before a query."""

    def __init__(self, pool: BlockPool, group_id: int, tokens_per_block: int, window: int) -> None:
        super().__init__(pool, group_id, tokens_per_block)
        self.window = window

    def first_needed(self, num_known_tokens: int) -> int:
        return max(0, num_known_tokens - self.window + 1) // self.tokens_per_block

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The most grains that end with a whole window here (shorter prefixes may lack theirs)."""
        per_block = self.tokens_per_block
        run = [0]  # run[k]: consecutive full blocks here that end with block k - 1
        for index in range(limit * HASH_TOKENS // per_block):
            found = self._find_full(hashes, index) is not None
            run.append(run[-1] + 1 if found else 0)
        for grain in range(limit, 0, -1):
            num_full, inside = divmod(grain * HASH_TOKENS, per_block)
            needed = max(0, num_full - self.first_needed(grain * HASH_TOKENS))
            if run[num_full] >= needed and (
                not inside or self._find_partial(hashes, grain) is not None
            ):
                return grain
        return 0


class ChunkedLocalAttentionManager(SlidingWindowManager):
    """Keeps only the tokens of the next query's own chunk; ``window``: tokens of a chunk."""

    def first_needed(self, num_known_tokens: int) -> int:
        return num_known_tokens // self.window * self.window // self.tokens_per_block


class HiddenStateManager(_PassingBlockManager):
    """Keeps rows that leave in the step that computes them: full blocks are released at once.

    At most ``max_retained_blocks`` blocks that are not held stay findable, so that a long
    prompt does not spread its rows over the whole pool. If that is not 0, a block is held
    until the grain in which it ends is known, as it is found under that grain's hash.
    """

    def __init__(
        self, pool: BlockPool, group_id: int, tokens_per_block: int, max_retained_blocks: int
    ) -> None:
        super().__init__(pool, group_id, tokens_per_block)
        self.max_retained_blocks = max_retained_blocks
        self._released: dict[str, list[int]] = {}  # blocks, by request
        self._retained: OrderedDict[int, None] = OrderedDict()

    def num_unneeded(self, num_computed_tokens: int) -> int:
        if self.max_retained_blocks:
            num_computed_tokens -= num_computed_tokens % HASH_TOKENS
        return num_computed_tokens // self.tokens_per_block

    def free(self, request_id: str) -> list[tuple[int, int]]:
        self._registered.pop(request_id, None)
        self._num_released.pop(request_id, None)
        self._release(request_id, self.tables.pop(request_id, []))
        released = self._released.pop(request_id)
        self._retain(released)
        return self._ends(released)

    def _let_go(self, request_id: str, blocks: list[int]) -> None:
        self._retain(self._release(request_id, blocks))

    def _release(self, request_id: str, blocks: list[int]) -> list[int]:
        """Release the next blocks of a request and forget those beyond the limit; return others."""
        self.pool.release(reversed(blocks))
        released = self._released.setdefault(request_id, [])
        room = max(self.max_retained_blocks - len(released), 0)
        kept = [block for block in blocks if block != NULL_BLOCK]
        self._forget(kept[room:])
        del kept[room:]
        released += kept
        return kept

    def _retain(self, blocks: Sequence[int]) -> None:
        """Keep these blocks findable, the first one longest: without it the rest is useless."""
        pool, retained = self.pool, self._retained
        # By now a block may be held again, or hold content of another group.
        own = [block for block in reversed(blocks) if pool.is_cached_for(block, self.group_id)]
        pool.touch(own)
        for block in own:
            retained[block] = None
            retained.move_to_end(block)
        while len(retained) > self.max_retained_blocks:
            block, _ = retained.popitem(last=False)
            self._forget((block,))

    def _forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.pool.is_cached_for(block, self.group_id):
                self.pool.forget(block)


class RecurrentStateManager:
    """Manages all recurrent groups: one state per group and request, and snapshots of it.

    At most ``max_retained_snapshots`` snapshots stay findable, so that the states of many
    short prompts do not spread over the whole pool.
    """

    def __init__(
        self, pool: BlockPool, group_ids: Sequence[int], max_retained_snapshots: int
    ) -> None:
        self.pool = pool
        self.group_ids = tuple(group_ids)
        self.max_retained_snapshots = max_retained_snapshots
        self._retained: OrderedDict[bytes, int] = OrderedDict()  # first blocks
        self.tables: dict[str, list[int]] = {}
        # First blocks of snapshots, with their position.
        self._used: dict[str, list[tuple[int, int]]] = {}
        self._spare: dict[str, list[int]] = {}

    @property
    def is_full(self) -> bool:
        """True if a further snapshot pushes another one out."""
        return len(self._retained) >= self.max_retained_snapshots

    def num_missing(self, request_id: str) -> int:
        """Count the blocks to add for the running state."""
        return 0 if request_id in self.tables else len(self.group_ids)

    def extend(self, request_id: str) -> list[int]:
        """Add the missing blocks of the running state; returns them."""
        if not self.group_ids or request_id in self.tables:
            return []
        self.tables[request_id] = self.pool.allocate(len(self.group_ids), for_states=True)
        return list(self.tables[request_id])

    def adopt(self, request_id: str, snapshot: Sequence[int]) -> list[tuple[int, int]]:
        """Add blocks for a copy of a snapshot, and hold that; returns (source, destination)s."""
        self.pool.acquire(snapshot)
        return list(zip(snapshot, self.extend(request_id), strict=True))

    def note_used(self, request_id: str, position: int, blocks: Sequence[int]) -> None:
        """Note a snapshot from which a request starts, or from which one will probably start."""
        self._used.setdefault(request_id, []).append((position, blocks[0]))

    def note_spare(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note a snapshot that is left in case another request has the same beginning."""
        self._spare.setdefault(request_id, []).append(blocks[0])

    def snapshots_of(self, request_id: str) -> list[int]:
        """First blocks of the snapshots that a request used or left; some may be gone by now."""
        used = [block for _, block in self._used.get(request_id, ())]
        return used + self._spare.get(request_id, [])

    def free(self, request_id: str) -> list[tuple[int, int]]:
        """Release the running state; returns (position, first block) of the used snapshots."""
        if state := self.tables.pop(request_id, None):
            self.pool.release(state)
        for block in self._spare.pop(request_id, ()):
            self.pool.demote(block)
        return self._used.pop(request_id, [])

    def find_snapshot(self, digest: bytes) -> list[int] | None:
        """Return the blocks of the whole snapshot at the prefix with that hash."""
        first = self.pool.find(self._key(digest)) if self.group_ids else None
        return None if first is None else self.pool.bundle(first)

    def _key(self, digest: bytes) -> BlockKey:
        return self.group_ids[0], digest, 0

    def register_snapshot(self, blocks: Sequence[int], digest: bytes) -> None:
        """Make held blocks findable as the state after a prefix."""
        self.pool.register_bundle(blocks, self._key(digest))
        self._retained[digest] = blocks[0]

    def note_found(self, digest: bytes) -> None:
        """Note that the snapshot at that prefix is useful: others are forgotten before it."""
        if digest in self._retained:
            self._retained.move_to_end(digest)

    def forget_old_snapshots(self) -> None:
        """Forget snapshots beyond the limit, the longest unused first; their blocks go next."""
        while len(self._retained) > self.max_retained_snapshots:
            digest, first = self._retained.popitem(last=False)
            # By now the block may hold something else, or be held.
            is_there = self.pool.find(self._key(digest)) == first
            if is_there and self.pool.is_cached_for(first, self.group_ids[0]):
                self.pool.forget(first)

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The most grains, up to ``limit``, at which a state was kept; 0 when none was."""
        for grain in range(limit, 0, -1):
            if self.pool.find(self._key(hashes[grain - 1])) is not None:
                return grain
        return 0
