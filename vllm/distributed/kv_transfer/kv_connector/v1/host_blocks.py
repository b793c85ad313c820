"""The contents of host blocks: the scheduler side of the offloading connector.

A *content* is a unit that is kept and evicted together: the blocks of one chunk of a group, or a
recurrent state. A request holds the contents that it stored or found until it ends; the policy
decides when a content that is not held is evicted. A request releases its states first, then its
tokens from the last to the first, so eviction shortens a prefix from its end and no state outlives
the tokens before it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import Load, SavedContent
from vllm.v1.core.block_pool import NULL_BLOCK, BlockKey, BlockPool
from vllm.v1.kv_offload.block_copies import BlockCopy
from vllm.v1.kv_offload.eviction import EvictionPolicy

Chunk = tuple[int, int]
"""(group, index of the chunk in its request)."""


@dataclass(eq=False)
class _Content:
    name: BlockKey
    """Name for the policy: the last key of the first block."""
    blocks: list[int] = field(default_factory=list)
    keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    """Block -> the keys under which it can be found."""
    num_holders: int = 0
    is_forgotten: bool = False
    """True if it must not be found any more; it is removed when its last holder releases it."""


class _Held:
    """The contents that one request holds."""

    def __init__(self) -> None:
        self.tokens: list[_Content] = []
        self.states: list[_Content] = []
        self.growing: dict[Chunk, _Content] = {}
        self.num_pending = 0
        """Number of blocks whose copies are not confirmed yet."""
        self.has_ended = False


class _Save(NamedTuple):
    step_number: int
    content: _Content
    blocks: list[int]
    saved: SavedContent


class HostIndex(BlockPool):
    """The index of stored blocks in which managers look."""

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks: dict[BlockKey, int] = {}
        self.contents: dict[int, _Content] = {}
        """Block -> its content, also for blocks that cannot be found yet."""

    def find(self, key: BlockKey) -> int | None:
        return self.blocks.get(key)

    def bundle(self, block: int) -> list[int]:
        return self.contents[block].blocks


class HostBlocks:
    """``num_blocks`` blocks of host memory, with the null block.

    ``chunk_blocks``: for each group, the number of adjacent blocks that are kept together;
    ``keeps_parts``: keep a chunk even if its request ended before it was full.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: type[EvictionPolicy],
        chunk_blocks: Sequence[int],
        keeps_parts: bool = True,
    ) -> None:
        self.index = HostIndex()
        self._policy = policy(num_blocks - 1)
        self._chunk_blocks = chunk_blocks
        self._keeps_parts = keeps_parts
        self._num_blocks = num_blocks
        self._unused = 1  # blocks from here on were never handed out
        self._free: list[int] = []
        self._num_held = 0
        self._contents: dict[Hashable, _Content] = {}  # contents that the policy knows, by name
        self._pending: deque[_Save] = deque()
        self._held: dict[str, _Held] = {}

    # Requests

    def begin(self, request_id: str, load: Load) -> None:
        """Let a request hold the contents that were found for it; it runs after them."""
        held = self._held.setdefault(request_id, _Held())
        held.growing.clear()  # its later saves make new contents
        for blocks, own in ((load.tokens, held.tokens), (load.state, held.states)):
            for content in dict.fromkeys(self.index.contents[block] for block in blocks):
                self._hold(content)
                self._policy.use(content.name)
                own.append(content)

    def end(self, request_id: str) -> None:
        """Note the end of a request; copies of its last saves may still be pending."""
        if request_id in self._held:
            self._held[request_id].has_ended = True
            self._release_ended(request_id)

    def _release_ended(self, request_id: str) -> None:
        held = self._held[request_id]
        if held.has_ended and not held.num_pending:
            del self._held[request_id]
            for content in (*held.states, *reversed(held.tokens)):
                self._release(content)

    def _hold(self, content: _Content) -> None:
        if not content.num_holders:
            self._num_held += len(content.blocks)
        content.num_holders += 1

    def _release(self, content: _Content) -> None:
        content.num_holders -= 1
        if content.num_holders:
            return
        self._num_held -= len(content.blocks)
        if content.keys and (self._keeps_parts or self._is_whole(content)):
            self._policy.renew(content.name)
        elif content.blocks:
            self._policy.discard(content.name)
            self._remove(content)

    def _is_whole(self, content: _Content) -> bool:
        return len(content.blocks) >= self._chunk_blocks[content.name[0]]

    # Saving

    def place(self, step_number: int, saves: Iterable[SavedContent]) -> list[BlockCopy]:
        """Allocate blocks for the saves of a step; saves without room are left out."""
        copies: list[BlockCopy] = []
        for saved in saves:
            count = len(saved.blocks)
            if self._num_blocks - 1 - self._num_held < count:
                break
            held = self._held[saved.request.request_id]
            content = self._content_for(saved, held)
            if content is None:
                continue
            blocks = self._take(count)
            content.blocks += blocks
            self._num_held += count
            self.index.contents.update(dict.fromkeys(blocks, content))
            held.num_pending += 1
            self._pending.append(_Save(step_number, content, blocks, saved))
            copies += map(BlockCopy, blocks, saved.blocks)
        return copies

    def _content_for(self, saved: SavedContent, held: _Held) -> _Content | None:
        """Return the content that takes the blocks, after making room; None: another request is
        saving the same."""
        name, count = saved.keys[-1], len(saved.blocks)
        if saved.is_state:
            chunk, own = None, held.states
        else:
            group_id, _, index = name
            chunk, own = (group_id, index // self._chunk_blocks[group_id]), held.tokens
            content = held.growing.get(chunk)
            if content is not None and content.blocks and not content.is_forgotten:
                self._evict(self._policy.grow(content.name, count, self._is_held))
                return content
        if name in self._contents:
            return None
        self._evict(self._policy.admit(name, count, self._is_held))
        content = self._contents[name] = _Content(name, num_holders=1)
        own.append(content)
        if chunk is not None:
            held.growing[chunk] = content
        return content

    def _is_held(self, name: Hashable) -> bool:
        return self._contents[name].num_holders > 0

    def _evict(self, names: Iterable[Hashable]) -> None:
        for name in names:
            self._remove(self._contents[name])

    def _take(self, count: int) -> list[int]:
        """Take the first free blocks, so that blocks saved together tend to be adjacent."""
        blocks = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        first = self._unused
        self._unused += count - len(blocks)
        return blocks + list(range(first, self._unused))

    def _remove(self, content: _Content) -> None:
        """Remove a content that the policy has evicted, and free its blocks."""
        del self._contents[content.name]
        self._forget(content)
        self._free_blocks(content, content.blocks)

    def _forget(self, content: _Content) -> None:
        for keys in content.keys.values():
            for key in keys:
                del self.index.blocks[key]
        content.keys.clear()

    def _free_blocks(self, content: _Content, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.index.contents[block]
            heapq.heappush(self._free, block)
        content.blocks = [block for block in content.blocks if block not in blocks]

    def confirm(self, step_number: int) -> None:
        """Note that the copies of this step were made; pending ones of earlier steps never were."""
        while self._pending and self._pending[0].step_number <= step_number:
            step, content, blocks, saved = self._pending.popleft()
            request = saved.request
            self._held[request.request_id].num_pending -= 1
            # Values that a request computed after a failed load do not match its keys.
            was_made = step == step_number and step > request.void_steps
            keys = [key for key in saved.keys if key not in self.index.blocks]
            if was_made and keys and not content.is_forgotten:
                content.keys[blocks[0]] = keys
                self.index.blocks.update(dict.fromkeys(keys, blocks[0]))
            else:  # another content has the same keys, or the values are not usable
                self._drop(content, blocks)
            self._release_ended(request.request_id)

    def _drop(self, content: _Content, blocks: list[int]) -> None:
        """Free blocks of a held content that cannot be found."""
        self._policy.discard(content.name, len(blocks))
        self._num_held -= len(blocks)
        self._free_blocks(content, blocks)
        if not content.blocks:
            del self._contents[content.name]

    # Forgetting

    def forget_all(self) -> None:
        """Forget all contents; the blocks that a request holds are freed when it ends."""
        for content in list(self._contents.values()):
            content.is_forgotten = True
            self._forget(content)
            if not content.num_holders:
                self._policy.discard(content.name)
                self._remove(content)

    def check_integrity(self) -> None:
        """Assert that blocks, contents, holders, index and policy agree."""
        held = Counter(c for h in self._held.values() for c in (*h.tokens, *h.states))
        contents = {*self._contents.values(), *held}
        used = [block for content in contents for block in content.blocks]
        assert sorted(used + self._free) == list(range(1, self._unused)), "a block is lost or twice"
        assert self._unused <= self._num_blocks and NULL_BLOCK not in used
        assert {b: c for c in contents for b in c.blocks} == self.index.contents
        assert {c: c.num_holders for c in contents if c.num_holders} == dict(held)
        assert self._num_held == sum(len(c.blocks) for c in held)
        known = {name: len(c.blocks) for name, c in self._contents.items()}
        assert self._policy.sizes() == known, "the policy knows other contents"
        keys = {key: b for c in contents for b, keys in c.keys.items() for key in keys}
        assert keys == self.index.blocks
        pending = Counter(save.saved.request.request_id for save in self._pending)
        assert {r: h.num_pending for r, h in self._held.items() if h.num_pending} == pending
