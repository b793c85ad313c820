"""Scheduler side of connectors that keep blocks by the hash of their prefix.

The key of a block is ``(group, hash of the prefix, index)``, as in the pool itself, so a prompt is
found in a store by the same rules as in the pool: full blocks, the first part of a block, a
window's last blocks, a recurrent state at one position.

    store        index: BlockPool.find, .bundle          its blocks, by the store's own numbers
    PrefixTracker.offer                                  tokens that can be loaded
                 .take_load                              copies store -> pool, for one request
                 .plan_saves                             blocks that this step fills
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.block_pool import NULL_BLOCK, BlockKey, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, PrefixHit
from vllm.v1.core.prefix_hash import HASH_TOKENS, extend_prefix_hashes
from vllm.v1.kv_offload.block_copies import BlockCopy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.cache_kinds.base import KVCacheConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MANY = 2**62


class Load(NamedTuple):
    """Stored blocks that a request begins with, and the copies to the pool that it needs."""

    copies: list[BlockCopy]
    tokens: list[int]
    """Stored blocks of its first tokens, in their order."""
    state: list[int]
    """Stored blocks of the recurrent state after these tokens."""

    @property
    def targets(self) -> dict[int, list[int]]:
        """Stored block -> the blocks of the pool that get its content, in this order."""
        found: dict[int, list[int]] = {}
        for stored, block in self.copies:
            found.setdefault(stored, []).append(block)
        return found


class SavedContent(NamedTuple):
    """Blocks of the pool that a step fills, and the keys of their content."""

    request: Request
    blocks: list[int]
    """One block; for a recurrent state one block for each recurrent group."""
    keys: list[BlockKey]
    """Keys of the content; the last one covers the most tokens."""
    is_state: bool = False


class NumberedIndex(BlockPool):
    """Gives numbers to the blocks of a store that knows keys only, because managers look for
    numbers; a number is valid until :meth:`forget_numbers`.

    ``has`` tells whether a block is stored. ``num_states``: number of recurrent groups.
    """

    def __init__(self, num_states: int, has: Callable[[BlockKey], bool]) -> None:
        super().__init__(2)
        self._has = has
        self._num_states = max(1, num_states)
        self._keys_by_number: list[BlockKey] = []
        self._numbers: dict[BlockKey, int] = {}

    def find(self, key: BlockKey) -> int | None:
        if not self._has(key):
            return None
        if key not in self._numbers:
            self._keys_by_number.append(key)
            self._numbers[key] = len(self._keys_by_number)
        return self._numbers[key]

    def bundle(self, block: int) -> list[int]:
        """Return the block once for each recurrent group: their states have one key."""
        return [block] * self._num_states

    def key_of(self, number: int) -> BlockKey:
        """Return the key of a number."""
        return self._keys_by_number[number - 1]

    def forget_numbers(self) -> None:
        """Start new numbers for another request; earlier requests are looked up again."""
        self._keys_by_number.clear()
        self._numbers.clear()


class _Collector(BlockPool):
    """Collects the blocks and keys that managers register."""

    def __init__(self) -> None:
        super().__init__(2)
        self.found: list[tuple[int, BlockKey]] = []

    def register(self, block: int, key: BlockKey) -> None:
        self.found.append((block, key))


class PrefixTracker:
    """Follows requests, finds their stored blocks in ``index`` and plans the blocks to store.

    Hits end at multiples of ``tokens_per_hit``. Raises ValueError if the pool has no room for
    blocks of rows until the hash of their prefix is known.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        index: BlockPool,
        tokens_per_hit: int = HASH_TOKENS,
    ) -> None:
        check_room_for_rows(vllm_config, kv_cache_config)
        self._index = index
        self._grains_per_hit = tokens_per_hit // HASH_TOKENS
        self._config = kv_cache_config
        limits = {"max_retained_hidden_blocks": MANY, "max_retained_snapshots": MANY}
        self._stored = KVCacheCoordinator(kv_cache_config, index, **limits)
        self._collector = _Collector()
        self._own = KVCacheCoordinator(kv_cache_config, self._collector, **limits)
        self._recurrent_ids = kv_cache_config.recurrent_group_ids
        self._requests: dict[str, Request] = {}
        self._hits: dict[str, PrefixHit] = {}
        self._unsaved: dict[str, dict[int, list[BlockKey]]] = {}  # blocks that are not full yet

    # Loading

    def offer(self, request: Request, num_found: int) -> int:
        """Return how many tokens after ``num_found`` are stored; :meth:`take_load` can take them
        until the next call."""
        self._hits.clear()
        extend_prefix_hashes(request, request.num_tokens)
        limit = (request.num_tokens - 1) // HASH_TOKENS
        if (row_position := request.next_row_position) is not None:
            limit = min(limit, row_position // HASH_TOKENS)
        hit = self._find(request, limit)
        if hit is None:
            return 0
        self._hits[request.request_id] = hit
        return max(0, hit.num_tokens - num_found)

    def _find(self, request: Request, limit: int) -> PrefixHit | None:
        hit = self._stored.find_longest_hit(request.prefix_hashes, limit)
        while hit is not None and (beyond := hit.num_grains % self._grains_per_hit):
            hit = self._stored.find_longest_hit(request.prefix_hashes, hit.num_grains - beyond)
        return hit

    def take_load(self, request: Request, blocks: KVCacheBlocks, num_loaded: int) -> Load:
        """Begin a request in ``blocks``; returns the load of ``num_loaded`` tokens into them."""
        request_id = request.request_id
        self._requests[request_id] = request
        hit = self._hits.pop(request_id, None)
        if hit is None:
            return Load([], [], [])
        tokens = [
            block
            for found in hit.groups
            for block in (*found.blocks, found.partial)
            if block is not None and block != NULL_BLOCK
        ]
        state = [member for block in hit.snapshot for member in self._index.bundle(block)]
        if not num_loaded:
            return Load([], tokens, state)
        tables = blocks.get_block_ids()
        first = hit.num_tokens - num_loaded
        copies = [*self._token_copies(hit, tables, first), *self._state_copies(hit, tables)]
        return Load(copies, tokens, state)

    def _token_copies(
        self, hit: PrefixHit, tables: tuple[list[int], ...], first_token: int
    ) -> Iterator[BlockCopy]:
        for manager, found in zip(self._stored.token_managers, hit.groups, strict=True):
            stored = [*found.blocks, *([] if found.partial is None else [found.partial])]
            table = tables[manager.group_id]
            for index in range(first_token // manager.tokens_per_block, len(stored)):
                if stored[index] != NULL_BLOCK and table[index] != NULL_BLOCK:
                    yield BlockCopy(stored[index], table[index])

    def _state_copies(self, hit: PrefixHit, tables: tuple[list[int], ...]) -> Iterator[BlockCopy]:
        for group_id, stored in zip(self._recurrent_ids, hit.snapshot, strict=True):
            yield BlockCopy(stored, tables[group_id][0])

    # Saving

    def plan_saves(self, step: SchedulerOutput) -> list[SavedContent]:
        """Return the contents that are new in the pool after ``step`` and not stored yet."""
        ends = {}
        for new in step.scheduled_new_reqs:
            self._start(new.req_id, new.block_ids)
            ends[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, tables, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids and tables is not None:
                self._start(request_id, tables)
            elif tables is not None:
                for manager in self._own.token_managers:
                    manager.tables[request_id] += tables[manager.group_id]
            ends[request_id] = num_computed
        saves: list[SavedContent] = []
        for request_id, start in ends.items():
            request = self._requests.get(request_id)
            if request is not None and _can_be_loaded(request):
                end = start + step.num_scheduled_tokens[request_id]
                saves += self._full_blocks(request, start, min(end, request.num_tokens))
                saves += self._states(request, start, step)
        return saves

    def _start(self, request_id: str, tables: tuple[list[int], ...]) -> None:
        self._forget_tables(request_id)
        for manager in self._own.token_managers:
            manager.tables[request_id] = list(tables[manager.group_id])
        self._unsaved[request_id] = {}

    def _forget_tables(self, request_id: str) -> None:
        for manager in self._own.token_managers:
            manager.forget_table(request_id)
        self._unsaved.pop(request_id, None)

    def _full_blocks(self, request: Request, start: int, end: int) -> Iterator[SavedContent]:
        """Yield the blocks that became full and, at the end of the prompt, partial blocks."""
        extend_prefix_hashes(request, end)
        unsaved = self._unsaved[request.request_id]
        is_prompt_end = start < request.num_prompt_tokens <= end
        for manager in self._own.token_managers:
            self._collector.found.clear()
            manager.register(request.request_id, request.prefix_hashes, end)
            for block, key in self._collector.found:
                unsaved.setdefault(block, []).append(key)
            num_full = end // HASH_TOKENS * HASH_TOKENS // manager.tokens_per_block
            for block, known in list(unsaved.items()):
                group_id, _, index = known[-1]
                if group_id == manager.group_id and (index < num_full or is_prompt_end):
                    keys = [key for key in unsaved.pop(block) if self._index.find(key) is None]
                    if keys:
                        yield SavedContent(request, [block], keys)

    def _states(
        self, request: Request, start: int, step: SchedulerOutput
    ) -> Iterator[SavedContent]:
        for snapshot in step.state_snapshots.get(request.request_id, ()):
            digest = request.prefix_hashes[(start + snapshot.num_tokens) // HASH_TOKENS - 1]
            key = (self._recurrent_ids[0], digest, 0)
            if self._index.find(key) is None:
                yield SavedContent(request, list(snapshot.block_ids), [key], is_state=True)

    def forget(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._requests.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._forget_tables(request_id)


def _can_be_loaded(request: Request) -> bool:
    """Return whether others can load its blocks: not if its caller requests the first rows."""
    first = None if request.extraction is None else request.extraction.next_position(0)
    return first is None or first >= HASH_TOKENS


def check_room_for_rows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError if blocks may be gone before the hash of their prefix is known."""
    room = vllm_config.cache_config.hidden_state_cache_bytes
    has_rows = kv_cache_config.hidden_state_group_id() is not None
    if has_rows and room is not None and room < kv_cache_config.block_bytes:
        raise ValueError(
            f"hidden_state_cache_bytes={room} cannot hold a block of hidden states, which this "
            f"connector stores: use at least {kv_cache_config.block_bytes}"
        )
