"""What connectors share that keep whole blocks by the hash of their prefix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    PrefixTracker,
    SavedContent,
)
from vllm.utils.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.cache_kinds.base import KVCacheReferences
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class PrefixConnector(KVConnectorBase_V1, SupportsHMA):
    """Blocks of every group, copied before and after the forward pass.

    A subclass sets ``_tracker`` on the scheduler side, and says where blocks are.
    """

    rows_leave_each_step = True  # it has copied them by then
    loads_rows = True
    reads_all_layers = False  # hashes of prefixes tell depths apart
    _tracker: PrefixTracker

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._lost: set[int] = set()

    # ---- worker side

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        (allocation,) = references.tensors
        self._pool = allocation.tensor

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost

    # ---- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return self._tracker.offer(request, num_computed_tokens), False

    def plan_saves(self, step: SchedulerOutput) -> list[SavedContent]:
        """What this step fills and is to be stored."""
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


def check_options(connector: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError: an option that the connector does not have."""
    for name in options:
        if name not in known:
            raise ValueError(
                f"{connector} has no option {name!r}{did_you_mean(name, known)}; "
                f"options: {', '.join(known)}"
            )
