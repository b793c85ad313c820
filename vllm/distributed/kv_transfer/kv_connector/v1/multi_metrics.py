"""Statistics of the connectors of a MultiConnector, each under its own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def part_names(classes: Sequence[type]) -> list[str]:
    """Name each connector by its class, with ``#index`` if an earlier one has the same name."""
    names = [one.__name__ for one in classes]
    return [
        name if names.index(name) == index else f"{name}#{index}"
        for index, name in enumerate(names)
    ]


class MultiKVConnectorStats(KVConnectorStats):
    """The stats of several connectors; ``data`` holds them by the connector's name."""

    data: dict[str, KVConnectorStats]

    def reset(self) -> None:
        for stats in self.data.values():
            stats.reset()

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        for name, stats in other.data.items():
            own = self.data.get(name)
            self.data[name] = stats if own is None else own.aggregate(stats)
        return self

    def reduce(self) -> dict[str, Any]:
        """Return the numbers of all connectors, as ``connector.number``."""
        return {
            f"{name}.{number}": value
            for name, stats in self.data.items()
            for number, value in stats.reduce().items()
        }

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """Passes each connector's stats to the metrics of its class."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        prom_metrics: Mapping[str, KVConnectorPromMetrics],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._prom_metrics = prom_metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, stats in transfer_stats_data.items():
            metrics = self._prom_metrics.get(name.partition("#")[0])
            if metrics is not None:
                metrics.observe(data_of(stats), engine_idx)


def data_of(stats: KVConnectorStats | dict[str, Any]) -> dict[str, Any]:
    """Return the data of stats, which may have become a dict in a message."""
    data: dict[str, Any] = stats["data"] if isinstance(stats, dict) else stats.data
    return data
