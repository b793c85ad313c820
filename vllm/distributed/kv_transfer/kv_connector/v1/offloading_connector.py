"""Keeps blocks in host memory: what the pool overwrites is loaded instead of computed.

Every block that a step fills is copied to the host in that step, with the states that are kept of
recurrent layers and the rows of hidden states; a prompt that begins with what was computed before
gets it back, whatever happened to the pool in between. Options (``kv_connector_extra_config``):
:class:`~.offloading_options.OffloadingOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_options import (
    has_own_spec,
    num_host_blocks,
    plan_chunks,
    read_options,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import PrefixConnector
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import PrefixTracker
from vllm.distributed.kv_transfer.kv_connector.v1.spec_connector import SpecConnector
from vllm.v1.cache_kinds.base import KVCacheReferences
from vllm.v1.kv_offload.block_copies import BlockCopies, BlockCopy
from vllm.v1.kv_offload.eviction import find_policy
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """Copies of one step: ``(host block, block)`` to load before it, to save after it."""

    step_number: int
    loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)


@dataclass
class SavedStep(KVConnectorWorkerMetadata):
    """The saves of this step are in host memory."""

    step_number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavedStep:
        assert isinstance(other, SavedStep)
        return SavedStep(min(self.step_number, other.step_number))


class OffloadingConnector(PrefixConnector):
    """Blocks of every group between the pool and host memory.

    With a ``spec_name`` of somebody else's a :class:`SpecConnector` is made in its place.
    """

    def __new__(cls, vllm_config: VllmConfig, *arguments: Any, **named: Any) -> Any:
        assert vllm_config.kv_transfer_config is not None
        if has_own_spec(vllm_config.kv_transfer_config.kv_connector_extra_config):
            return SpecConnector(vllm_config, *arguments, **named)
        return super().__new__(cls)

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None, "made by the engine, which has a plan"
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        chunks = plan_chunks(options, kv_cache_config)
        self._num_blocks = num_host_blocks(options, kv_cache_config.block_bytes, chunks)
        if role is KVConnectorRole.SCHEDULER:
            policy = find_policy(options.eviction_policy)
            self._host = HostBlocks(self._num_blocks, policy, chunks.blocks, chunks.keeps_parts)
            self._tracker = PrefixTracker(
                vllm_config, kv_cache_config, self._host.index, chunks.tokens_per_hit
            )
            self._loads: list[BlockCopy] = []

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if has_own_spec(options):
            OffloadingSpecFactory.find_spec(options)
        else:
            read_options(options)

    # ---- worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        advice = "lower cpu_bytes_to_use (kv_offloading_size) or num_cpu_blocks"
        self._copies = BlockCopies(self._pool, self._num_blocks, advice)
        self._saved: SavedStep | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copies.end_saves()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._copies.load(self._step().loads)

    def wait_for_save(self) -> None:
        """Nothing is waited for: the next step begins behind the copies."""
        step = self._step()
        self._copies.save(step.saves)
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
