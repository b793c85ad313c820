"""The base of connectors that keep whole blocks by the hash of their prefix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    PrefixTracker,
    SavedContent,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.cache_kinds.base import KVCacheReferences
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


LoadT = TypeVar("LoadT")
SaveT = TypeVar("SaveT")


@dataclass
class StepTransfers(KVConnectorMetadata, Generic[LoadT, SaveT]):
    """Transfers of one step: loads before its forward pass, and saves after it."""

    step_number: int
    loads: list[LoadT]
    saves: list[SaveT]


@dataclass
class EndedSaves(KVConnectorWorkerMetadata):
    """A report that the saves of steps have ended."""

    ranks_of_steps: Counter[int]
    """Number of a step -> number of ranks on which they have."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> EndedSaves:
        assert isinstance(other, EndedSaves)
        return EndedSaves(self.ranks_of_steps + other.ranks_of_steps)


class PrefixConnector(KVConnectorBase_V1, SupportsHMA, Generic[LoadT, SaveT]):
    """Copies blocks of every group before and after the forward pass.

    A subclass sets ``_tracker`` on the scheduler side, and maps blocks to its store (:meth:`begin`,
    :meth:`place`). If its store needs a report of ended saves, it sets ``_ended`` in that step.
    """

    rows_leave_each_step = True  # it copies rows in the step that computes them
    keeps_rows_back = True
    loads_rows = True
    reads_all_layers = False  # hashes of prefixes distinguish depths
    _tracker: PrefixTracker

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed_blocks: set[int] = set()
        self._ended: EndedSaves | None = None
        self._loads: list[LoadT] = []  # of the step that is being planned

    # Worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        (allocation,) = references.tensors
        self._pool = allocation.tensor

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed_blocks, self._failed_blocks = self._failed_blocks, set()
        return failed_blocks

    def build_connector_worker_meta(self) -> EndedSaves | None:
        ended, self._ended = self._ended, None
        return ended

    def _step(self) -> StepTransfers[LoadT, SaveT]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepTransfers)
        return metadata

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return self._tracker.offer(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        load = self._tracker.take_load(request, blocks, num_external_tokens)
        self._loads += self.begin(request, load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        number = scheduler_output.step_number
        loads, self._loads = self._loads, []
        return StepTransfers(number, loads, self.place(number, self.plan_saves(scheduler_output)))

    def begin(self, request: Request, load: Load) -> list[LoadT]:
        """Note that a request begins with ``load``; returns the transfers for its copies."""
        raise NotImplementedError

    def place(self, step_number: int, saves: list[SavedContent]) -> list[SaveT]:
        """Return the transfers that store ``saves``, as many as there is room for."""
        raise NotImplementedError

    def plan_saves(self, step: SchedulerOutput) -> list[SavedContent]:
        """Return the contents that this step fills and that are to be stored."""
        saves = self._tracker.plan_saves(step)
        return saves if self._kv_transfer_config.is_kv_producer else []

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tracker.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])
