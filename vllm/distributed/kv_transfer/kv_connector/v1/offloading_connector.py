"""Keeps blocks in host memory: what the pool overwrites is loaded instead of computed.

Every block that a step fills is copied to the host in that step, with the states that are kept of
recurrent layers and the rows of hidden states; a prompt that begins with what was computed before
gets it back, whatever happened to the pool in between. Options (``kv_connector_extra_config``):

    cpu_bytes_to_use    bytes of host memory; ``kv_offloading_size`` gives them in GiB
    eviction_policy     "lru": what was not used for the longest time goes first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import (
    PrefixConnector,
    check_options,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    BlockToLoad,
    Load,
    PrefixTracker,
    SavedContent,
)
from vllm.utils.host_memory import allocate_host_bytes
from vllm.v1.cache_kinds.base import KVCacheReferences
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import canonical_kv_caches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

OPTIONS = ("cpu_bytes_to_use", "eviction_policy")


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """Copies of one step: ``(host block, block)`` to load before it, to save after it."""

    step_number: int
    loads: list[BlockToLoad] = field(default_factory=list)
    saves: list[BlockToLoad] = field(default_factory=list)


@dataclass
class SavedStep(KVConnectorWorkerMetadata):
    """The saves of this step are in host memory."""

    step_number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavedStep:
        assert isinstance(other, SavedStep)
        return SavedStep(min(self.step_number, other.step_number))


class _Held:
    """Host blocks of what one request computed or loaded."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.num_pending = 0
        """Contents that are on their way."""
        self.has_ended = False


class HostBlocks:
    """Scheduler half: which block of host memory holds what.

    As in the pool itself a request holds what it stored and what it found until it ends, and lets
    go of its states first, then of its tokens from the last to the first: so what is overwritten
    shortens a prefix bit by bit, and no state outlives the tokens before it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._pending: deque[tuple[int, SavedContent, list[int]]] = deque()
        self._held: dict[str, _Held] = {}

    def begin(self, request_id: str, load: Load) -> None:
        """A request runs behind what was found for it."""
        held = self._held.setdefault(request_id, _Held())
        self.pool.acquire([*load.tokens, *load.state])
        held.tokens += load.tokens
        held.states += load.state

    def place(self, step_number: int, contents: list[SavedContent]) -> list[BlockToLoad]:
        """Room for what a step saves; what finds none is not saved."""
        copies = []
        for content in contents:
            if self.pool.num_free_blocks < len(content.blocks):
                break
            stored = self.pool.allocate(len(content.blocks))
            self._pending.append((step_number, content, stored))
            self._held[content.request.request_id].num_pending += 1
            copies += list(map(BlockToLoad, stored, content.blocks))
        return copies

    def confirm(self, step_number: int) -> None:
        """The copies of this step were made, those of earlier ones that are pending never were."""
        while self._pending and self._pending[0][0] <= step_number:
            step, content, stored = self._pending.popleft()
            held = self._held[content.request.request_id]
            held.num_pending -= 1
            # What a request computed from blocks that did not come is not what its keys say.
            if step == step_number and step > content.request.void_steps:
                for key in content.keys:
                    if content.is_state:
                        self.pool.register_bundle(stored, key)
                    else:
                        self.pool.register(stored[0], key)
            if self.pool.hash_of(stored[0]) is None:  # or another has the same
                self.pool.release(stored)
            else:
                (held.states if content.is_state else held.tokens).extend(stored)
            self._release_ended(content.request.request_id)

    def end(self, request_id: str) -> None:
        """A request ended; what it saved last may be on its way."""
        if request_id in self._held:
            self._held[request_id].has_ended = True
            self._release_ended(request_id)

    def _release_ended(self, request_id: str) -> None:
        held = self._held[request_id]
        if held.has_ended and not held.num_pending:
            del self._held[request_id]
            self.pool.release([*held.states, *reversed(held.tokens)])

    def forget_all(self) -> None:
        """Empty."""
        self.pool.forget_all()


class OffloadingConnector(PrefixConnector):
    """Blocks of every group between the pool and host memory."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None, "made by the engine, which has a plan"
        self._num_blocks = _num_host_blocks(
            self._kv_transfer_config.kv_connector_extra_config, kv_cache_config.block_bytes
        )
        if role is KVConnectorRole.SCHEDULER:
            self._host = HostBlocks(self._num_blocks)
            self._tracker = PrefixTracker(vllm_config, kv_cache_config, self._host.pool)
            self._loads: list[BlockToLoad] = []

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        _num_host_blocks(vllm_config.kv_transfer_config.kv_connector_extra_config, 1)

    # ---- worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        groups = canonical_kv_caches(references).group_data_refs
        used = max(reference.page_size_bytes for group in groups for reference in group)
        if self._pool.device.type == "cpu":
            advice = "lower cpu_bytes_to_use (kv_offloading_size)"
            memory = allocate_host_bytes(self._num_blocks * used, "host memory", advice)
            self._memory = memory.view(self._num_blocks, used)
        else:
            self._memory = torch.empty(self._num_blocks, used, dtype=torch.int8, pin_memory=True)
        self._saved: SavedStep | None = None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for stored, block in self._step().loads:
            own = self._memory[stored]
            self._pool[block, : len(own)].copy_(own, non_blocking=True)

    def wait_for_save(self) -> None:
        step = self._step()
        for stored, block in step.saves:
            own = self._memory[stored]
            own.copy_(self._pool[block, : len(own)], non_blocking=True)
        self._saved = SavedStep(step.step_number)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        saved, self._saved = self._saved, None
        return saved

    def _step(self) -> OffloadingMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OffloadingMetadata)
        return metadata

    # ---- scheduler side

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        load = self._tracker.take_load(request, blocks, num_external_tokens)
        self._host.begin(request.request_id, load)
        self._loads += load.copies

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        saves = self.plan_saves(scheduler_output)
        number = scheduler_output.step_number
        return OffloadingMetadata(number, loads, self._host.place(number, saves))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        saved = connector_output.kv_connector_worker_meta
        if isinstance(saved, SavedStep):
            self._host.confirm(saved.step_number)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._host.end(request.request_id)
        return super().request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        self._host.forget_all()
        return True


def _num_host_blocks(options: Mapping[str, Any], block_bytes: int) -> int:
    """Blocks that fit ``cpu_bytes_to_use``, the null block among them; ValueError: too few."""
    check_options("OffloadingConnector", options, OPTIONS)
    policy = options.get("eviction_policy", "lru")
    if policy != "lru":
        raise ValueError(f"eviction_policy={policy!r} is not supported; supported: 'lru'")
    size = options.get("cpu_bytes_to_use")
    if not isinstance(size, int | float) or size < 2 * block_bytes:
        raise ValueError(
            f"cpu_bytes_to_use={size!r} is not a number of bytes that holds a block of "
            f"{block_bytes}; use at least {2 * block_bytes}"
        )
    return int(size) // block_bytes
