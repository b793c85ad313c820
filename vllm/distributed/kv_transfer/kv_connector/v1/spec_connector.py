"""Offloading to a place of somebody else's: an ``OffloadingSpec`` behind the tracker of prefixes.

    scheduler   manager.lookup for every block of a new prompt; touch, prepare_load;
                prepare_store for what a step fills; complete_load, complete_store when it ran
    worker      handler.transfer_async and wait: loads before the forward pass, stores after it

A block is offered alone, under the hash of its longest prefix; a recurrent state as one block of
each of its groups. A transfer that fails is a failed load (``kv_load_failure_policy``), or a store
that did not succeed. Transfers are waited for: blocks of the pool may be others' in the next step.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import EndedStep, PrefixConnector
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    NumberedIndex,
    PrefixTracker,
    SavedContent,
)
from vllm.logger import init_logger
from vllm.v1.cache_kinds.base import KVCacheConfig, KVCacheReferences
from vllm.v1.core.block_pool import BlockKey
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    canonical_kv_caches,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class Transfer(NamedTuple):
    """Blocks from one place to another."""

    job_id: int
    source: LoadStoreSpec
    target: LoadStoreSpec
    blocks: list[int]
    """Those of the pool."""


@dataclass
class _Pending:
    """What the manager is told when a step has ended."""

    job_id: int
    request: Request
    keys: list[OffloadKey]
    is_load: bool
    step_number: int = -1


class _Block(NamedTuple):
    """A block that is moved; they are in this order."""

    group_id: int
    position: int
    """In the table of its request."""
    block_id: int
    key: OffloadKey


class SpecIndex(NumberedIndex):
    """What the manager has."""

    def __init__(self, manager: OffloadingManager, recurrent_group_ids: Sequence[int]) -> None:
        super().__init__(len(recurrent_group_ids), self._is_stored)
        self._manager = manager
        self._recurrent_ids = recurrent_group_ids
        self.request: ReqContext | None = None
        """For whom is asked; None: nobody asks, so nothing is found."""
        self.is_unknown = False
        """An answer was "not known yet"."""

    def _is_stored(self, key: BlockKey) -> bool:
        if self.request is None:
            return False
        for offload_key in self.offload_keys(key):
            answer = self._manager.lookup(offload_key, self.request)
            self.is_unknown |= answer is None
            if not answer:
                return False
        return True

    def offload_keys(self, key: BlockKey) -> list[OffloadKey]:
        """What the manager calls a block; of a recurrent state one of each of its groups."""
        group_id, digest, index = key
        groups = self._recurrent_ids if group_id in self._recurrent_ids else [group_id]
        block_hash = digest + index.to_bytes(4, "big")
        return [make_offload_key(block_hash, group) for group in groups]

    def keys_of(self, numbers: Iterable[int]) -> list[BlockKey]:
        """What numbers stand for, each once."""
        return [self.key_of(number) for number in dict.fromkeys(numbers)]


class SpecConnector(PrefixConnector[Transfer, Transfer]):
    """Blocks of every group between the pool and a spec's place."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._spec = OffloadingSpecFactory.find_spec(options)(vllm_config, kv_cache_config)
        _check_block_size(options, kv_cache_config)
        self._manager: OffloadingManager | None = None
        self._handlers: list[Any] = []
        if role is KVConnectorRole.SCHEDULER:
            self._manager = self._spec.get_manager()
            self._index = SpecIndex(self._manager, kv_cache_config.recurrent_group_ids)
            self._tracker = PrefixTracker(vllm_config, kv_cache_config, self._index)
            self._job_ids = itertools.count()
            self._pending: deque[_Pending] = deque()

    # ---- worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        self._handlers = list(self._spec.get_handlers(canonical_kv_caches(references)))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for transfer in self._run(self._step().loads):
            self._lost.update(transfer.blocks)

    def wait_for_save(self) -> None:
        step = self._step()
        # What this step computed may be wrong where a load failed.
        failed = step.saves if self._lost else self._run(step.saves)
        self._ended = EndedStep(step.step_number, {transfer.job_id for transfer in failed})

    def _run(self, transfers: list[Transfer]) -> list[Transfer]:
        """Move blocks; returns the transfers that failed."""
        begun: dict[int, Transfer] = {}
        by_handler: dict[int, tuple[Any, set[int]]] = {}
        for transfer in transfers:
            handler = self._handler(transfer)
            try:
                if handler.transfer_async(transfer.job_id, (transfer.source, transfer.target)):
                    begun[transfer.job_id] = transfer
                    by_handler.setdefault(id(handler), (handler, set()))[1].add(transfer.job_id)
            except Exception as error:
                logger.warning("%s: a transfer failed: %s", type(handler).__name__, error)
        moved: set[int] = set()
        for handler, job_ids in by_handler.values():
            handler.wait(job_ids)
            moved |= {result.job_id for result in handler.get_finished() if result.success}
        return [t for t in transfers if t.job_id not in begun or t.job_id not in moved]

    def _handler(self, transfer: Transfer) -> Any:
        for source, target, handler in self._handlers:
            if isinstance(transfer.source, source) and isinstance(transfer.target, target):
                return handler
        raise RuntimeError(
            f"{type(self._spec).__name__} has no handler from {transfer.source.medium()} to "
            f"{transfer.target.medium()}"
        )

    # ---- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        index = self._index
        index.forget_numbers()
        index.request, index.is_unknown = _context(request), False
        try:
            found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            index.request = None
        return (None if index.is_unknown else found), False

    def begin(self, request: Request, load: Load) -> list[Transfer]:
        assert self._manager is not None
        context = _context(request)
        found = self._index.keys_of([*load.tokens, *load.state])
        if found:
            self._manager.touch(
                [k for key in found for k in self._index.offload_keys(key)], context
            )
        targets = load.targets
        if not targets:
            return []
        blocks = self._in_order(zip(self._index.keys_of(targets), targets.values(), strict=True))
        source = self._manager.prepare_load([block.key for block in blocks], context)
        return [self._transfer(request, blocks, source, is_load=True)]

    def place(self, step_number: int, saves: list[SavedContent]) -> list[Transfer]:
        by_request: dict[str, list[SavedContent]] = {}
        for saved in saves:
            by_request.setdefault(saved.request.request_id, []).append(saved)
        stores = [store for own in by_request.values() if (store := self._store(own)) is not None]
        for pending in self._pending:
            if pending.step_number < 0:
                pending.step_number = step_number
        return stores

    def _store(self, contents: list[SavedContent]) -> Transfer | None:
        assert self._manager is not None
        request = contents[0].request
        wanted = {saved.keys[-1]: saved.blocks for saved in contents}
        blocks = self._in_order(wanted.items())
        answer = self._manager.prepare_store([block.key for block in blocks], _context(request))
        if answer is None or not answer.keys_to_store:
            return None
        chosen = set(answer.keys_to_store)
        blocks = [block for block in blocks if block.key in chosen]
        if [block.key for block in blocks] != list(answer.keys_to_store):
            raise RuntimeError("prepare_store returned keys in another order than it was given")
        return self._transfer(request, blocks, answer.store_spec, is_load=False)

    def _in_order(self, contents: Iterable[tuple[BlockKey, list[int]]]) -> list[_Block]:
        """Blocks of the pool under the manager's keys, group by group."""
        return sorted(
            _Block(get_offload_group_idx(offload_key), key[2], block, offload_key)
            for key, blocks in contents
            for offload_key, block in zip(self._index.offload_keys(key), blocks, strict=True)
        )

    def _transfer(
        self, request: Request, blocks: list[_Block], place: LoadStoreSpec, *, is_load: bool
    ) -> Transfer:
        """Of these blocks, which the manager keeps until it is told that it has ended."""
        sizes = Counter(block.group_id for block in blocks)
        first = {block.group_id: block.position for block in reversed(blocks)}
        ids = [block.block_id for block in blocks]
        groups = range(self._num_groups)
        pool = GPULoadStoreSpec(ids, [sizes[g] for g in groups], [first.get(g, 0) for g in groups])
        job_id = next(self._job_ids)
        self._pending.append(_Pending(job_id, request, [block.key for block in blocks], is_load))
        source, target = (place, pool) if is_load else (pool, place)
        return Transfer(job_id, source, target, ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = connector_output.kv_connector_worker_meta
        if not isinstance(ended, EndedStep) or self._manager is None:
            return
        number = ended.step_number
        while self._pending and 0 <= self._pending[0].step_number <= number:
            pending = self._pending.popleft()
            context = _context(pending.request)
            if pending.is_load:
                self._manager.complete_load(pending.keys, context)
                continue
            was_made = pending.step_number == number and pending.job_id not in ended.failed
            success = was_made and number > pending.request.void_steps
            self._manager.complete_store(pending.keys, context, success)

    def take_events(self) -> Iterable[Any]:
        return () if self._manager is None else list(self._manager.take_events())

    def shutdown(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
        for _, _, handler in self._handlers:
            handler.shutdown()
        self._handlers, self._manager = [], None


def _context(request: Request) -> ReqContext:
    return ReqContext(request.request_id, request.kv_transfer_params)


def _check_block_size(options: dict[str, Any], config: KVCacheConfig) -> None:
    """ValueError: blocks of a spec of somebody else's are the pool's."""
    sizes = {
        group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if not group.kv_cache_spec.is_recurrent
    }
    asked = options.get("block_size")
    if asked is not None and {asked} != sizes:
        raise ValueError(
            f"block_size={asked!r} is not supported with spec_name={options['spec_name']!r}: its "
            f"blocks are the pool's, of {', '.join(map(str, sorted(sizes)))} tokens; leave it out"
        )
