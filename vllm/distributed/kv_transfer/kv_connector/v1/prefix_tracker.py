"""Scheduler half of connectors that keep blocks by the hash of their prefix.

A block is known by ``(group, hash of the prefix, index)``, as in the pool itself, so that what a
store has of a prompt is found by the same rules as what the pool has: full blocks, the first part
of a block, a window's last blocks, a recurrent state at one position.

    store        index: BlockPool.find, .bundle          what it has, by numbers of its own
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
    """What a request has of what is stored, and what of it is to be copied."""

    copies: list[BlockCopy]
    tokens: list[int]
    """Stored blocks of its first tokens, in their order."""
    state: list[int]
    """Of the recurrent state behind them."""

    @property
    def targets(self) -> dict[int, list[int]]:
        """Stored block -> the blocks that get its content one after the other."""
        found: dict[int, list[int]] = {}
        for stored, block in self.copies:
            found.setdefault(stored, []).append(block)
        return found


class SavedContent(NamedTuple):
    """Blocks of the pool that a step fills, and what they will hold."""

    request: Request
    blocks: list[int]
    """One; of a recurrent state one for each recurrent group."""
    keys: list[BlockKey]
    """The last one covers most tokens."""
    is_state: bool = False


class NumberedIndex(BlockPool):
    """A store that knows blocks by their keys, as managers look for them: by numbers, which hold
    until :meth:`forget_numbers`.

    ``has``: whether a block is stored. ``num_states``: recurrent groups.
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
        """States of all recurrent groups have one key."""
        return [block] * self._num_states

    def key_of(self, number: int) -> BlockKey:
        """What a number stands for."""
        return self._keys_by_number[number - 1]

    def forget_numbers(self) -> None:
        """Another request is asked for; what earlier ones found they are asked for again."""
        self._keys_by_number.clear()
        self._numbers.clear()


class _Collector(BlockPool):
    """Takes what managers make findable."""

    def __init__(self) -> None:
        super().__init__(2)
        self.found: list[tuple[int, BlockKey]] = []

    def register(self, block: int, key: BlockKey) -> None:
        self.found.append((block, key))


class PrefixTracker:
    """Follows requests; asks ``index`` what is stored and says what is to be.

    Hits end at multiples of ``tokens_per_hit``. Raises ValueError: without prefix caching blocks
    are not known by their prefix.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        index: BlockPool,
        tokens_per_hit: int = HASH_TOKENS,
    ) -> None:
        check_prefix_caching(vllm_config, kv_cache_config)
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

    # ---- loading

    def offer(self, request: Request, num_found: int) -> int:
        """Tokens after ``num_found`` that are stored, for :meth:`take_load` until the next call."""
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
        """A request begins in these blocks; what is to be loaded into them."""
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

    # ---- saving

    def plan_saves(self, step: SchedulerOutput) -> list[SavedContent]:
        """What is new in the pool after ``step`` and not stored yet."""
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
            if request is not None and _is_of_use(request):
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
        """Blocks that became full, and at the end of the prompt those that are not."""
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
        """A request ended."""
        self._requests.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._forget_tables(request_id)


def _is_of_use(request: Request) -> bool:
    """Whether what it computes can be loaded: not where its caller wants the first rows."""
    first = None if request.extraction is None else request.extraction.next_position(0)
    return first is None or first >= HASH_TOKENS


def check_prefix_caching(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """ValueError where blocks may be gone before the hash of their prefix is known."""
    cache_config = vllm_config.cache_config
    if not cache_config.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching=False: this connector stores blocks by the hash of their "
            "prefix; leave the option out, or use another connector"
        )
    room = cache_config.hidden_state_cache_bytes
    has_rows = kv_cache_config.hidden_state_group_id() is not None
    if has_rows and room is not None and room < kv_cache_config.block_bytes:
        raise ValueError(
            f"hidden_state_cache_bytes={room} holds no block of hidden states, which this "
            f"connector stores: use at least {kv_cache_config.block_bytes}"
        )
