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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import PrefixConnector
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
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
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass
class Transfer:
    """Blocks from one place to another."""

    job_id: int
    source: LoadStoreSpec
    target: LoadStoreSpec
    blocks: list[int]
    """Those of the pool."""


@dataclass
class SpecMetadata(KVConnectorMetadata):
    """Transfers of one step."""

    step_number: int
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)


@dataclass
class EndedTransfers(KVConnectorWorkerMetadata):
    """The transfers of this step ended, these not well."""

    step_number: int
    failed: set[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> EndedTransfers:
        assert isinstance(other, EndedTransfers)
        step_number = min(self.step_number, other.step_number)
        return EndedTransfers(step_number, self.failed | other.failed)


@dataclass
class _Pending:
    """What the manager is told when a step has ended."""

    step_number: int
    job_id: int
    request: Request
    keys: list[OffloadKey]


class SpecIndex(NumberedIndex):
    """What the manager has."""

    def __init__(self, manager: OffloadingManager, recurrent_group_ids: Sequence[int]) -> None:
        super().__init__(len(recurrent_group_ids))
        self._manager = manager
        self._recurrent_ids = recurrent_group_ids
        self.request: ReqContext | None = None
        """For whom is asked; None: nobody asks, so nothing is found."""
        self.is_unknown = False
        """An answer was "not known yet"."""

    def has(self, key: BlockKey) -> bool:
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


class SpecConnector(PrefixConnector):
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
            self._loads: list[tuple[Transfer, _Pending]] = []
            self._pending_loads: list[_Pending] = []
            self._pending_stores: list[_Pending] = []

    # ---- worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        self._handlers = list(self._spec.get_handlers(canonical_kv_caches(references)))
        self._ended: EndedTransfers | None = None
        self._failed: set[int] = set()

    def _step(self) -> SpecMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SpecMetadata)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for transfer in self._run(self._step().loads):
            self._lost.update(transfer.blocks)

    def wait_for_save(self) -> None:
        stores = self._step().stores
        # What this step computed may be wrong where a load failed.
        failed = stores if self._lost else self._run(stores)
        self._failed.update(transfer.job_id for transfer in failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended = EndedTransfers(self._step().step_number, self._failed)
        self._failed = set()
        return ended

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
        index.request, index.is_unknown = _context(request), False
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        index.request = None
        return (None if index.is_unknown else found), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._manager is not None
        load = self._tracker.take_load(request, blocks, num_external_tokens)
        context = _context(request)
        found = self._index.keys_of([*load.tokens, *load.state])
        if found:
            self._manager.touch(
                [k for key in found for k in self._index.offload_keys(key)], context
            )
        targets: dict[int, list[int]] = {}
        for number, block in load.copies:
            targets.setdefault(number, []).append(block)
        if not targets:
            return
        keys, pool = self._in_groups(zip(self._index.keys_of(targets), targets.values()))
        source = self._manager.prepare_load(keys, context)
        job_id = next(self._job_ids)
        pending = _Pending(-1, job_id, request, keys)
        self._loads.append((Transfer(job_id, source, pool, pool.block_ids.tolist()), pending))

    def _in_groups(
        self, contents: Iterable[tuple[BlockKey, list[int]]]
    ) -> tuple[list[OffloadKey], GPULoadStoreSpec]:
        """Keys of the manager and their blocks of the pool, group by group."""
        entries = []
        for key, blocks in contents:
            for offload_key, block in zip(self._index.offload_keys(key), blocks, strict=True):
                group_id = get_offload_group_idx(offload_key)
                entries.append((group_id, key[2], block, offload_key))
        entries.sort()
        of_groups = [[e for e in entries if e[0] == group] for group in range(self._num_groups)]
        return [entry[3] for entry in entries], GPULoadStoreSpec(
            [entry[2] for entry in entries],
            [len(group) for group in of_groups],
            [group[0][1] if group else 0 for group in of_groups],
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        number = scheduler_output.step_number
        loads, self._loads = self._loads, []
        for _, pending in loads:
            pending.step_number = number
            self._pending_loads.append(pending)
        stores = []
        by_request: dict[str, list[SavedContent]] = {}
        for saved in self.plan_saves(scheduler_output):
            by_request.setdefault(saved.request.request_id, []).append(saved)
        for contents in by_request.values():
            transfer = self._store(number, contents)
            if transfer is not None:
                stores.append(transfer)
        return SpecMetadata(number, [transfer for transfer, _ in loads], stores)

    def _store(self, step_number: int, contents: list[SavedContent]) -> Transfer | None:
        assert self._manager is not None
        request = contents[0].request
        wanted = {saved.keys[-1]: saved.blocks for saved in contents}
        keys, _ = self._in_groups(wanted.items())
        answer = self._manager.prepare_store(keys, _context(request))
        if answer is None or not answer.keys_to_store:
            return None
        chosen = set(answer.keys_to_store)
        parts = [
            (key, wanted[key])
            for key in wanted
            if chosen.intersection(self._index.offload_keys(key))
        ]
        ordered, pool = self._in_groups(parts)
        blocks = [
            (key, block)
            for key, block in zip(ordered, pool.block_ids.tolist(), strict=True)
            if key in chosen
        ]
        if [key for key, _ in blocks] != list(answer.keys_to_store):
            raise RuntimeError("prepare_store returned keys in another order than it was given")
        counts = Counter(get_offload_group_idx(key) for key, _ in blocks)
        sizes = [counts[group_id] for group_id in range(self._num_groups)]
        source = GPULoadStoreSpec([block for _, block in blocks], sizes, pool.block_indices)
        job_id = next(self._job_ids)
        stored = list(answer.keys_to_store)
        self._pending_stores.append(_Pending(step_number, job_id, request, stored))
        return Transfer(job_id, source, answer.store_spec, [block for _, block in blocks])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = connector_output.kv_connector_worker_meta
        if not isinstance(ended, EndedTransfers) or self._manager is None:
            return
        number = ended.step_number
        for pending in _take(self._pending_loads, number):
            self._manager.complete_load(pending.keys, _context(pending.request))
        for pending in _take(self._pending_stores, number):
            was_made = pending.step_number == number and pending.job_id not in ended.failed
            success = was_made and number > pending.request.void_steps
            self._manager.complete_store(pending.keys, _context(pending.request), success)

    def take_events(self) -> Iterable[Any]:
        return () if self._manager is None else list(self._manager.take_events())

    def shutdown(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
        for _, _, handler in self._handlers:
            handler.shutdown()
        self._handlers, self._manager = [], None


def _take(pending: list[_Pending], step_number: int) -> list[_Pending]:
    """Those up to a step, which are pending no more."""
    taken = [one for one in pending if one.step_number <= step_number]
    del pending[: len(taken)]
    return taken


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
