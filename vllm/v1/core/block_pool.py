"""Reference counts of the pool's blocks, and the index of content that can be found in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from vllm.v1.core.cache_events import CacheEvents

BlockHash = NewType("BlockHash", bytes)
"""Hash of all tokens of a request up to the end of some block."""
BlockKey = tuple[int, bytes, int]
"""(group, hash of the prefix, index of the block in its request)."""

NULL_BLOCK = 0
"""A block that is never handed out; tables contain it where they hold nothing."""


class BlockPool:
    """Reference counts, the index of findable content, and the order of reuse.

    A block is *held* (references > 0), *idle* (holds nothing worth finding, or was never
    used), or *cached* (not held, but its content can still be found). Idle blocks are
    handed out first, the last freed first, so that a pool that is never full touches
    little memory; then cached ones, the longest unused first. Blocks of tokens come from
    the front of the pool and recurrent states from its back, as long as there is room on
    that side: a request holds many state blocks, a short one never writes them, and
    blocks of tokens spread among them would touch all of that memory.

    Several blocks can be a *bundle*: one content under one key, held and released together.
    Its first block represents it in the order of reuse; when that is overwritten, all are
    lost. Bundles are recurrent states, without which no prefix can be found: a block that
    was released before every cached bundle is overwritten before unused memory is taken.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs the null block and one more")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._next_unused = 1  # at the front
        self._first_back = num_blocks  # blocks from here on were taken from the back
        self._idle_front: list[int] = []
        self._idle_back: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # a bundle by its first block
        self._num_cached = 0  # blocks, including all of each bundle
        self._followers: dict[int, tuple[int, ...]] = {}  # by the first block of a bundle
        self._is_follower = [False] * num_blocks
        self._index: dict[BlockKey, int] = {}
        self._keys: dict[int, list[BlockKey]] = {}
        self.num_releases = 0
        """Calls of :meth:`release`: while it stays the same, no more blocks have become free."""
        self.on_recycle: Callable[[Sequence[int]], None] | None = None
        """Called with blocks whose content is lost for good; tests poison them."""
        self.events: CacheEvents | None = None
        """Receives what enters and leaves the index."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that :meth:`allocate` can hand out."""
        return self.num_idle_blocks + self._num_cached

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that can be handed out without losing findable content."""
        num_unused = self._first_back - self._next_unused
        return num_unused + len(self._idle_front) + len(self._idle_back)

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return 1 - self.num_free_blocks / (self.num_blocks - 1)

    def is_cached_for(self, block: int, group_id: int) -> bool:
        """Return whether ``block`` is not held and content of that group can be found in it."""
        return block in self._cached and self._keys[block][0][0] == group_id

    def allocate(self, count: int, *, for_states: bool = False) -> list[int]:
        """Hand out ``count`` blocks, each held once. The caller has checked that there is room.

        KeyError: there is none.
        """
        own, other = self._idle_front, self._idle_back
        if for_states:
            own, other = other, own
        blocks: list[int] = []
        while len(blocks) < count:
            left = count - len(blocks)
            blocks += (
                _take_last(own, left)
                or self._overwrite_stale()
                or self._take_unused(left, for_states)
                or _take_last(other, left)
                or self._overwrite_cached()
            )
        if len(blocks) > count:
            self._add_idle(blocks[count:])
            del blocks[count:]
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def _add_idle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            (self._idle_front if block < self._first_back else self._idle_back).append(block)

    def _take_unused(self, most: int, for_states: bool) -> range:
        begin, end = self._next_unused, self._first_back
        if for_states:
            begin = self._first_back = max(begin, end - most)
        else:
            end = self._next_unused = min(begin + most, end)
        return range(begin, end)

    def _overwrite_stale(self) -> list[int]:
        """Overwrite one block that was released before every cached bundle, if there is one."""
        if not self._followers:
            return []
        oldest = next(iter(self._cached), None)
        if oldest is None or oldest in self._followers:
            return []
        return self._overwrite_cached()

    def _overwrite_cached(self) -> list[int]:
        block, _ = self._cached.popitem(last=False)
        blocks = self._forget_content(block)
        self._num_cached -= len(blocks)
        if self.on_recycle:
            self.on_recycle(blocks)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of the blocks that were found."""
        for block in blocks:
            if self._references[block] == 0 and not self._is_follower[block]:
                del self._cached[block]
                self._num_cached -= 1 + len(self._followers.get(block, ()))
            self._references[block] += 1

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Count the free ones among ``blocks``: acquiring them lowers ``num_free_blocks``."""
        return sum(self._references[block] == 0 for block in blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Release blocks, in the order in which they may be overwritten. Null is ignored."""
        lost = []
        references = self._references
        self.num_releases += 1
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = references[block] = references[block] - 1
            assert left >= 0, f"block {block} released too often"
            if left or self._is_follower[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
                self._num_cached += 1 + len(self._followers.get(block, ()))
            else:
                lost.append(block)
        if lost:
            self._add_idle(lost)
            if self.on_recycle:
                self.on_recycle(lost)

    def touch(self, blocks: Iterable[int]) -> None:
        """Let each cached one of ``blocks`` be overwritten after all others that are cached."""
        cached = self._cached
        for block in blocks:
            if block in cached:
                cached.move_to_end(block)

    def demote(self, block: int) -> None:
        """Let a cached block be overwritten before all others that are cached now."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def find(self, key: BlockKey) -> int | None:
        """The block with that content, held or not."""
        return self._index.get(key)

    def register(self, block: int, key: BlockKey) -> None:
        """Make the content of a held block findable; the first block with a content keeps it."""
        if key not in self._index:
            self._index[key] = block
            self._keys.setdefault(block, []).append(key)
            if self.events is not None:
                self.events.store(*key[:2])

    def register_bundle(self, blocks: Sequence[int], key: BlockKey) -> None:
        """Make the content of held blocks findable that are only useful together."""
        if key not in self._index:
            self.register(blocks[0], key)
            self._followers[blocks[0]] = tuple(blocks[1:])
            for block in blocks[1:]:
                self._is_follower[block] = True

    def bundle(self, block: int) -> list[int]:
        """All blocks of the bundle that begins with ``block``."""
        return [block, *self._followers.get(block, ())]

    def hash_of(self, block: int) -> bytes | None:
        """Hash of the longest prefix under which the block can be found."""
        keys = self._keys.get(block)
        return keys[-1][1] if keys else None

    def forget_holding(self, block: int) -> None:
        """Do the same as :meth:`forget` for any block, including one in the middle of a bundle."""
        if 0 < block < self.num_blocks and self._is_follower[block]:
            block = next(b for b, rest in self._followers.items() if block in rest)
        if block in self._keys:
            self.forget(block)

    def forget(self, block: int) -> None:
        """Make the content of a block, or of the bundle that begins with it, unfindable.

        Cached blocks become idle.
        """
        blocks = self._forget_content(block)
        if block in self._cached:
            del self._cached[block]
            self._num_cached -= len(blocks)
            self._add_idle(blocks)
            if self.on_recycle:
                self.on_recycle(blocks)

    def _forget_content(self, block: int) -> list[int]:
        """Remove the keys of the block and dissolve its bundle; return the bundle's blocks."""
        for key in self._keys.pop(block, ()):
            del self._index[key]
            if self.events is not None:
                self.events.remove(*key[:2])
        followers = self._followers.pop(block, ())
        for follower in followers:
            self._is_follower[follower] = False
        return [block, *followers]

    def forget_all(self) -> None:
        """Make everything unfindable."""
        if self.events is not None:
            self.events.clear()
        for block in list(self._keys):
            self.forget(block)

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Assert that every block is in exactly one state and the index is consistent.

        ``holders``: references to each block in the tables of all requests; when given,
        reference counts must equal it.
        """
        idle = {*self._idle_front, *self._idle_back}
        cached = {block for first in self._cached for block in self.bundle(first)}
        assert len(idle) == len(self._idle_front) + len(self._idle_back), "a block is idle twice"
        assert not idle & cached, "a block is idle and cached"
        assert len(cached) == self._num_cached
        for first, followers in self._followers.items():
            assert first in self._keys, f"the bundle of block {first} cannot be found"
            assert all(self._is_follower[block] for block in followers)
        assert all(block < self._next_unused for block in self._idle_front)
        assert all(block >= self._first_back for block in self._idle_back)
        for block in (*range(1, self._next_unused), *range(self._first_back, self.num_blocks)):
            held = self._references[block] > 0
            assert held + (block in idle) + (block in cached) == 1, f"state of block {block}"
            assert block not in idle or block not in self._keys, f"idle block {block} is findable"
        assert self._references[NULL_BLOCK] == 0
        for key, block in self._index.items():
            assert key in self._keys[block], f"index and keys disagree about block {block}"
        assert len(self._index) == sum(map(len, self._keys.values()))
        if holders is not None:
            counted = {b: n for b, n in enumerate(self._references) if n}
            expected = {b: n for b, n in holders.items() if n and b != NULL_BLOCK}
            assert counted == expected, "reference counts differ from what requests hold"


def _take_last(idle: list[int], most: int) -> list[int]:
    blocks = idle[: -most - 1 : -1]
    del idle[-most:]
    return blocks
