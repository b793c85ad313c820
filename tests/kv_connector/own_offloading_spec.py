"""An offloading spec as somebody else writes one: blocks in a dict, a few at most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

MANAGERS: list[SlotManager] = []
"""Every one that was made."""
FAILING: set[str] = set()
"""Ways in which transfers fail: to "GPU", to "slots"."""


class SlotSpec(LoadStoreSpec):
    def __init__(self, slots: list[int]) -> None:
        self.slots = slots

    @staticmethod
    def medium() -> str:
        return "slots"


class SlotManager(OffloadingManager):
    def __init__(self, num_slots: int, patience: int) -> None:
        self.slots: dict[OffloadKey, int] = {}
        self.ready: dict[OffloadKey, None] = {}
        self.being_read: list[OffloadKey] = []
        self.free = list(range(num_slots))
        self.events: list[OffloadingEvent] = []
        self.patience = patience
        self.calls: list[str] = []
        self.is_shut_down = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        assert req_context.req_id
        if key in self.ready and self.patience:
            self.patience -= 1
            return None
        return key in self.ready

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.being_read += keys
        return SlotSpec([self.slots[key] for key in keys])

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self.ready[key] = self.ready.pop(key)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self.being_read.remove(key)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        new = [key for key in keys if key not in self.slots]
        gone = []
        for key in [key for key in self.ready if key not in self.being_read]:
            if len(self.free) >= len(new):
                break
            del self.ready[key]
            self.free.append(self.slots.pop(key))
            gone.append(key)
        if len(self.free) < len(new):
            return None
        self.slots.update((key, self.free.pop()) for key in new)
        return PrepareStoreOutput(new, SlotSpec([self.slots[key] for key in new]), gone)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.calls.append("stored" if success else "lost")
        for key in keys:
            if success:
                self.ready[key] = None
            else:
                self.free.append(self.slots.pop(key))
        self.events.append(OffloadingEvent(list(keys), "slots", removed=not success))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def shutdown(self) -> None:
        self.is_shut_down = True

    def check(self, num_slots: int) -> None:
        assert not self.being_read and self.slots.keys() == self.ready.keys()
        assert sorted([*self.free, *self.slots.values()]) == list(range(num_slots))


class SlotHandler(OffloadingHandler):
    def __init__(self, kv_caches: CanonicalKVCaches, slots: dict[int, torch.Tensor]) -> None:
        self.caches, self.slots = kv_caches, slots
        self.ended: list[TransferResult] = []
        self.waited: set[int] = set()

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        pool = source if isinstance(source, GPULoadStoreSpec) else target
        places = target if pool is source else source
        assert isinstance(pool, GPULoadStoreSpec) and isinstance(places, SlotSpec)
        groups = [g for g, size in enumerate(pool.group_sizes) for _ in range(size)]
        for group, block, slot in zip(groups, pool.block_ids, places.slots, strict=True):
            (reference,) = self.caches.group_data_refs[group]
            rows = self.caches.tensors[reference.tensor_idx].tensor
            own = rows[int(block), : reference.page_size_bytes]
            if target.medium() in FAILING:
                continue
            if pool is source:
                self.slots[slot] = own.clone()
            else:
                own.copy_(self.slots[slot])
        self.ended.append(TransferResult(job_id, target.medium() not in FAILING))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        assert {result.job_id for result in ended} <= self.waited
        return ended

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids


class SlotOffloadingSpec(OffloadingSpec):
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self.num_slots = self.extra_config["num_slots"]
        assert len(self.gpu_block_size) == len(kv_cache_config.kv_cache_groups)

    def get_manager(self) -> OffloadingManager:
        MANAGERS.append(SlotManager(self.num_slots, self.extra_config.get("patience", 0)))
        return MANAGERS[-1]

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        handler = SlotHandler(kv_caches, {})
        yield GPULoadStoreSpec, SlotSpec, handler
        yield SlotSpec, GPULoadStoreSpec, handler


class NoManagerSpec(OffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any: ...


class NotASpec: ...
