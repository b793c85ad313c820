"""A connector of another package that counts, on both sides, and notes cache events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


@dataclass
class Counts(KVConnectorStats):
    """``data``: lists of sizes by side."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for side, sizes in other.data.items():
            self.data[side] = [*self.data.get(side, []), *sizes]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"{side} sum": sum(sizes) for side, sizes in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class CountMetrics(KVConnectorPromMetrics):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        histogram = self._histogram_cls(
            "vllm:toy_sizes", "Sizes", buckets=[5, 50], labelnames=self._labelnames
        )
        self.sizes = self.make_per_engine(histogram)
        counter = self._counter_cls("vllm:toy_steps", "Steps", labelnames=self._labelnames)
        self.steps = self.make_per_engine(counter)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.steps[engine_idx].inc(len(transfer_stats_data.get("scheduler", [])))  # type: ignore
        for size in transfer_stats_data.get("worker", []):
            self.sizes[engine_idx].observe(size)  # type: ignore[union-attr]


class CountingConnector(KVConnectorBase_V1, SupportsHMA):
    reads_all_layers = False
    _size = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._size = sum(len(m.layout.seq_lens) for m in forward_context.attn_metadata.values())

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role.name == "SCHEDULER":
            return Counts({"scheduler": [1]})
        size, self._size = self._size, 0
        return Counts({"worker": [size]} if size else {})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return CountMetrics(*arguments)

    def get_kv_connector_kv_cache_events(self) -> Any:
        return [type(self).__name__]

    def update_connector_output(self, connector_output: Any) -> None:
        (told,) = connector_output.kv_cache_events
        self._events = [BlockStored([told.encode()], None, [1, 2], 2, medium="CPU")]

    def take_events(self) -> Any:
        events, self._events = self._events, []
        return events


class AnotherCounter(CountingConnector):
    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> None:  # type: ignore[override]
        return None


class CannotCount(CountingConnector):
    def get_kv_connector_stats(self) -> Any:
        if self.role.name == "SCHEDULER":
            raise RuntimeError("does not add up")
        return Counts({"worker": [object()]})

    def take_events(self) -> Any:
        raise RuntimeError("no events")


class OfferingConnector(CountingConnector):
    """Offers a block of each prompt, without its hidden states."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 16 if num_computed_tokens + 16 < request.num_tokens else 0, False
