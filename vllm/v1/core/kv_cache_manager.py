"""The scheduler's view of the pool: room for tokens, prefix hits, snapshots."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.block_pool import NULL_BLOCK, BlockPool
from vllm.v1.core.cache_events import CacheEvent, CacheEvents
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, PrefixHit
from vllm.v1.core.prefix_hash import HASH_TOKENS, extend_prefix_hashes
from vllm.v1.core.sched.output import BlockCopy, StateSnapshot
from vllm.v1.request import Request


class KVCacheBlock(NamedTuple):
    """One entry of a block table, as connectors see it."""

    block_id: int
    block_hash: bytes | None
    """Hash of the prefix whose content it holds; None: not computed, or not loaded, yet."""

    @property
    def is_null(self) -> bool:
        """True if the table holds nothing here."""
        return self.block_id == NULL_BLOCK


class KVCacheBlocks(NamedTuple):
    """Blocks of one request, one list per group."""

    blocks: tuple[list[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The ids of every group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Blocks of the only group into which something is to be loaded or computed."""
        (ids,) = self.get_unhashed_block_ids_all_groups()
        return ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Blocks of each group into which something is to be loaded or computed."""
        return [
            [b.block_id for b in group if b.block_hash is None and not b.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """The same number of groups, without blocks."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))


@dataclass
class _StepPlan:
    """Blocks that are held for one step."""

    copies: list[BlockCopy] = field(default_factory=list)
    snapshots: list[tuple[Request, bytes, StateSnapshot]] = field(default_factory=list)
    """Request, prefix hash and order of each snapshot."""
    void: set[str] = field(default_factory=set)
    """Requests whose values are wrong."""


class KVCacheManager:
    """Allocates blocks to requests and finds prefixes in the pool.

    The calls of a step are :meth:`find_prefix` and :meth:`allocate` for each request, then
    :meth:`plan_snapshots` and :meth:`end_plan`, and after the forward pass
    :meth:`finish_step`. The next step may be planned before that.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_caching: bool,
        keeps_prefixes: bool | None = None,
        snapshot_interval: int,
        max_retained_hidden_blocks: int,
        max_retained_snapshots: int,
        state_grain: int = HASH_TOKENS,
        notes_events: bool = False,
    ) -> None:
        """``keeps_prefixes``: keep what a prefix needs although no request finds it here, for a
        connector; None: if ``enable_caching``."""
        self.pool = BlockPool(config.num_blocks)
        self.keeps_prefixes = enable_caching if keeps_prefixes is None else keeps_prefixes
        self.events = self.pool.events = CacheEvents() if notes_events else None
        self.coordinator = KVCacheCoordinator(
            config,
            self.pool,
            max_retained_hidden_blocks=max_retained_hidden_blocks if self.keeps_prefixes else 0,
            max_retained_snapshots=max_retained_snapshots,
        )
        self.enable_caching = enable_caching
        self.snapshot_interval = snapshot_interval
        self.state_grain = state_grain  # states are kept at multiples of it
        self._position_grain = math.gcd(state_grain, snapshot_interval)
        # The interval times a power of two, so that positions farther apart are multiples, too.
        self.overwriting_interval = snapshot_interval
        while self.overwriting_interval < self.coordinator.tokens_per_snapshot:
            self.overwriting_interval *= 2
        self._branches: dict[str, int] = {}  # tokens found in blocks, with or without a state
        self._plan = _StepPlan()
        self._plans: dict[int, _StepPlan] = {}  # steps that have not ended, by number

    def find_prefix(self, request: Request) -> PrefixHit | None:
        """Find the prefix of a request in the pool; at least one token is left to compute."""
        if not self.enable_caching or not self._is_cached(request):
            return None
        if request.sampling_params.prompt_logprobs is not None:  # they need every position
            return None
        extend_prefix_hashes(request, request.num_tokens)
        limit = (request.num_tokens - 1) // HASH_TOKENS
        if (row_position := request.next_row_position) is not None:
            limit = min(limit, row_position // HASH_TOKENS)
        if self.coordinator.has_recurrent_state:
            limit = self.coordinator.longest_token_hit(request.prefix_hashes, limit)
            self._branches[request.request_id] = limit * HASH_TOKENS
        if limit <= 0:
            return None
        return self.coordinator.find_longest_hit(request.prefix_hashes, limit)

    def _is_cached(self, request: Request) -> bool:
        """Return whether a request can use kept prefixes, and leaves something for others.

        A request whose caller wants the rows of its first tokens could never be given a
        prefix, and no other request computes to its depth.
        """
        extraction = request.extraction
        if extraction is not None and (extraction.next_position(0) or 0) < HASH_TOKENS:
            return False
        return self.keeps_prefixes and not request.is_computed_from_forgotten

    def allocate(
        self,
        request: Request,
        num_tokens: int,
        hit: PrefixHit | None = None,
        num_known: int = 0,
    ) -> bool:
        """Make room for the first ``num_tokens`` tokens of a request; False when there is none.

        ``hit``: only for a request that holds nothing yet. Its last block and the recurrent
        state are copied before the step (:meth:`end_plan`). ``num_known``: tokens of the hit
        and those that a connector loads after it.
        """
        managers = self.coordinator.token_managers
        recurrent = self.coordinator.recurrent
        request_id = request.request_id
        needed = recurrent.num_missing(request_id)
        for i, manager in enumerate(managers):
            num_found = len(hit.groups[i].blocks) if hit else 0
            needed += manager.num_missing(
                request_id, num_tokens, num_found=num_found, num_known=num_known
            )
        free = self.pool.num_free_blocks
        if hit:
            free -= self.pool.num_unheld(hit.shared_blocks)
        if needed > free:
            return False
        if hit:
            self._adopt(request_id, hit, num_known)
        for manager in managers:
            manager.extend(request_id, num_tokens, num_known)
        recurrent.extend(request_id)
        return True

    def has_blocks(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a running request has blocks for so many tokens. Mostly it has."""
        for manager in self.coordinator.token_managers:
            if len(manager.tables[request_id]) * manager.tokens_per_block < num_tokens:
                return False
        return True

    def _adopt(self, request_id: str, hit: PrefixHit, num_known: int) -> None:
        # Everything found is held before anything is allocated: allocating may overwrite
        # blocks that are not held.
        shared = hit.shared_blocks
        self.pool.acquire(shared)
        for manager, group_hit in zip(self.coordinator.token_managers, hit.groups, strict=True):
            if len(group_hit.blocks) < manager.first_needed(num_known):
                group_hit = group_hit._replace(partial=None)
            copy = manager.adopt(request_id, group_hit, hit.num_grains)
            if copy:
                self._plan.copies.append(BlockCopy(*copy))
        if hit.snapshot:
            recurrent = self.coordinator.recurrent
            recurrent.note_used(request_id, hit.num_tokens, hit.snapshot)
            copies = recurrent.adopt(request_id, hit.snapshot)
            self._plan.copies += [BlockCopy(*copy) for copy in copies]
        self.pool.release(shared)

    def release_unneeded(self, request: Request) -> None:
        """Release blocks that later tokens of a running request do not read."""
        for manager in self.coordinator.passing_managers:
            manager.release_unneeded(request.request_id, request.num_finished_tokens)

    def block_counts(self, request_id: str) -> tuple[int, ...]:
        """Length of each token table, to tell later which blocks were added."""
        managers = self.coordinator.token_managers
        return tuple([len(manager.tables.get(request_id, ())) for manager in managers])

    def block_ids(
        self, request_id: str, since: tuple[int, ...] | None = None
    ) -> tuple[list[int], ...]:
        """Blocks of each group; with ``since``, only those added after that block_counts."""
        ids: list[list[int]] = [[] for _ in range(self.coordinator.num_groups)]
        for i, manager in enumerate(self.coordinator.token_managers):
            start = since[i] if since else 0
            ids[manager.group_id] = manager.tables.get(request_id, [])[start:]
        if since is None:
            recurrent = self.coordinator.recurrent
            for group_id, block in zip(recurrent.group_ids, recurrent.tables.get(request_id, ())):
                ids[group_id].append(block)
        return tuple(ids)

    def blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of a request, with the hashes under which they can be found."""
        return KVCacheBlocks(
            tuple(
                [KVCacheBlock(block, self.pool.hash_of(block)) for block in group]
                for group in self.block_ids(request_id)
            )
        )

    def holds_any(self, request_id: str, blocks: Collection[int]) -> bool:
        """Return whether one of ``blocks`` is in a table of the request."""
        return any(not set(blocks).isdisjoint(table) for table in self.block_ids(request_id))

    def forget(self, blocks: Iterable[int]) -> None:
        """Make the content of these blocks unfindable: it is not what it should be."""
        for block in blocks:
            self.pool.forget_holding(block)

    def forget_request(self, request_id: str) -> None:
        """Make all that a request computed unfindable, in steps under way too: it is wrong."""
        for table in self.block_ids(request_id):
            self.forget(table)
        self.forget(self.coordinator.recurrent.snapshots_of(request_id))
        for plan in self._plans.values():
            plan.void.add(request_id)

    def undo_copies(self, request_id: str) -> None:
        """Cancel the copies into blocks that the request gives back before the step."""
        own = {block for table in self.block_ids(request_id) for block in table}
        undone = [copy for copy in self._plan.copies if copy.destination in own]
        self._plan.copies = [copy for copy in self._plan.copies if copy.destination not in own]
        self.pool.release(copy.source for copy in undone)

    def end_plan(self, step_number: int) -> list[BlockCopy]:
        """End the plan of a step; return the copies to make before it, whose sources it holds."""
        plan, self._plan = self._plan, _StepPlan()
        self._plans[step_number] = plan
        return plan.copies

    def plan_snapshots(
        self, chunks: Iterable[tuple[Request, int, int]]
    ) -> dict[str, list[StateSnapshot]]:
        """Choose the states to keep in a step that computes tokens [start, end) of each request."""
        if not self.coordinator.recurrent.group_ids:
            return {}
        planned: dict[str, list[StateSnapshot]] = {}
        spare: list[tuple[Request, int, int]] = []
        grain = self._position_grain
        for request, start, end in chunks:
            if start // grain == end // grain:
                continue  # the case of most decoded tokens
            wanted, others = self._snapshot_positions(request, start, end)
            own = [self._plan_snapshot(request, start, at, is_spare=False) for at in wanted]
            if found := [snapshot for snapshot in own if snapshot is not None]:
                planned[request.request_id] = found
            spare += [(request, start, at) for at in others]
        for request, start, at in spare:
            if snapshot := self._plan_snapshot(request, start, at, is_spare=True):
                planned.setdefault(request.request_id, []).append(snapshot)
        return {request_id: sorted(own) for request_id, own in planned.items()}

    def _snapshot_positions(
        self, request: Request, start: int, end: int
    ) -> tuple[list[int], list[int]]:
        """Positions in tokens [start, end) after which a state is worth keeping: the wanted ones,
        and the spare ones, which are planned after the wanted ones of all requests of the step.

        Wanted are the state at the end of the prompt, and the one where an earlier prompt
        diverged: a third prompt may follow.
        """
        if not self._is_cached(request):
            return [], []
        end = min(end, request.num_tokens)  # the last token may not be known yet
        grain, interval = self.state_grain, self.snapshot_interval
        extend_prefix_hashes(request, end)
        ends = (request.num_prompt_tokens - 1, self._branches.get(request.request_id, 0))
        wanted = [position // grain * grain for position in ends]
        positions = snapshot_positions(start, end, interval, *wanted)
        here = [position for position in positions if position in wanted]
        return here, [position for position in positions if position not in wanted]

    def _plan_snapshot(
        self, request: Request, start: int, position: int, *, is_spare: bool
    ) -> StateSnapshot | None:
        """Plan to keep the state at ``position`` of a chunk from ``start`` on, if there is room.

        Called when all requests of the step have their blocks: snapshots take blocks that
        hold nothing. Some may overwrite the content that was unused for longest: the wanted
        states, and others as long as they take no more of the pool than the tokens do. These
        others are the first to be overwritten, unless they are used before. When the limit of
        kept states is reached, the same rule decides which ones may push others out.
        """
        recurrent = self.coordinator.recurrent
        digest = request.prefix_hashes[position // HASH_TOKENS - 1]
        if recurrent.find_snapshot(digest):
            return None
        may_overwrite = not is_spare or position % self.overwriting_interval == 0
        room = self.pool.num_free_blocks
        if not may_overwrite:
            room = 0 if recurrent.is_full else self.pool.num_idle_blocks
        if room < len(recurrent.group_ids):
            return None
        blocks = self.pool.allocate(len(recurrent.group_ids), for_states=True)
        if is_spare:
            recurrent.note_spare(request.request_id, blocks)
        else:
            recurrent.note_used(request.request_id, position, blocks)
        snapshot = StateSnapshot(position - start, tuple(blocks))
        self._plan.snapshots.append((request, digest, snapshot))
        return snapshot

    def finish_step(self, step_number: int) -> None:
        """Take in that a step ran: its copies were made and its snapshots written."""
        plan = self._plans.get(step_number, _StepPlan())
        for request, digest, snapshot in plan.snapshots:
            if request.request_id in plan.void:
                continue
            if self.events is not None:
                self.events.request = request
            self.coordinator.recurrent.register_snapshot(snapshot.block_ids, digest)
        self.abandon_step(step_number)
        self.coordinator.recurrent.forget_old_snapshots()

    def abandon_step(self, step_number: int) -> None:
        """Release the blocks of copies and snapshots, without making them findable."""
        plan = self._plans.pop(step_number, _StepPlan())
        self.pool.release(copy.source for copy in plan.copies)
        for _, _, snapshot in plan.snapshots:
            self.pool.release(snapshot.block_ids)

    def register(self, request: Request) -> None:
        """Make findable what a running request has computed."""
        if not self._is_cached(request):
            return
        num_tokens = request.num_finished_tokens
        extend_prefix_hashes(request, num_tokens)
        if self.events is not None:
            self.events.request = request
        for manager in self.coordinator.token_managers:
            manager.register(request.request_id, request.prefix_hashes, num_tokens)

    def free(self, request: Request) -> None:
        """Release everything a request holds; its content stays findable.

        Blocks of later tokens are overwritten first, in every group: so a hit gets shorter
        bit by bit, and no group keeps blocks that are useless without those of another.
        """
        self._branches.pop(request.request_id, None)
        ends = self.coordinator.recurrent.free(request.request_id)
        for manager in self.coordinator.token_managers:
            ends += manager.free(request.request_id)
        self.pool.touch([block for _, block in sorted(ends, reverse=True)])

    def reset_prefix_cache(self) -> None:
        """Make everything unfindable, including what running requests hold."""
        self.pool.forget_all()

    def take_events(self) -> list[CacheEvent]:
        """Return what entered and left the prefix cache since the last call, if it is recorded."""
        return [] if self.events is None else self.events.take()

    @property
    def usage(self) -> float:
        return self.pool.usage

    def check_integrity(self) -> None:
        """Assert that the pool's counts equal what the tables of requests hold."""
        holders = self.coordinator.holders()
        for plan in (self._plan, *self._plans.values()):
            holders.update(copy.source for copy in plan.copies)
            for _, _, snapshot in plan.snapshots:
                holders.update(snapshot.block_ids)
        self.pool.check_integrity(holders)


def snapshot_positions(start: int, end: int, interval: int, *wanted: int) -> list[int]:
    """Positions in (start, end] at which to keep the recurrent state.

    They are ``interval`` tokens apart at first, and farther apart as the length grows, so
    that a missed hit costs at most about an eighth of the prefix and the states of a long
    prompt do not fill the pool. The positions ``wanted`` are added.
    """
    positions = {position for position in wanted if start < position <= end}
    position = start
    while True:
        # At most 16 positions in each doubling of the length.
        spacing = interval
        while spacing * 16 <= position:
            spacing *= 2
        position = (position // spacing + 1) * spacing
        if position > end:
            return sorted(positions)
        positions.add(position)
