"""Keeps blocks in host memory: what the pool overwrites is loaded instead of computed.

Every block that a step fills is copied to the host in that step, with the states that are kept of
recurrent layers and the rows of hidden states; a prompt that begins with what was computed before
gets it back, whatever happened to the pool in between. Options (``kv_connector_extra_config``):
:class:`~.offloading_options.OffloadingOptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.host_blocks import HostBlocks
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_options import (
    has_own_spec,
    num_host_blocks,
    plan_chunks,
    read_options,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import (
    EndedStep,
    PrefixConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    PrefixTracker,
    SavedContent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.spec_connector import SpecConnector
from vllm.v1.cache_kinds.base import KVCacheReferences
from vllm.v1.kv_offload.block_copies import BlockCopies, BlockCopy
from vllm.v1.kv_offload.eviction import find_policy
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class OffloadingConnector(PrefixConnector[BlockCopy, BlockCopy]):
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

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copies.end_saves()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._copies.load(self._step().loads)

    def wait_for_save(self) -> None:
        """Nothing is waited for: the next step begins behind the copies."""
        step = self._step()
        self._copies.save(step.saves)
        self._ended = EndedStep(step.step_number, set())

    # ---- scheduler side

    def begin(self, request: Request, load: Load) -> list[BlockCopy]:
        self._host.begin(request.request_id, load)
        return load.copies

    def place(self, step_number: int, saves: list[SavedContent]) -> list[BlockCopy]:
        return self._host.place(step_number, saves)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, EndedStep):
            self._host.confirm(ended.step_number)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._host.end(request.request_id)
        return super().request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        self._host.forget_all()
        return True
