"""Statistics of connectors, from the connector to the log and to Prometheus.

    connector   get_kv_connector_stats, worker side and scheduler side, every step
    scheduler   adds them up, one report per step
    front end   KVConnectorLogging    build_kv_connector_stats(data), aggregate, reduce
                KVConnectorPrometheus build_prom_metrics(...), observe(data)

``data`` of stats is sent between processes, so it holds only types that msgpack knows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partialmethod
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm.config.connectors import find_connector_class
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

logger = init_logger(__name__)

PromMetric = Gauge | Counter | Histogram
PromMetricT = TypeVar("PromMetricT", bound=PromMetric)


@dataclass
class KVConnectorStats:
    """The counts of a connector since they were last read."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Set all counts to zero."""
        raise NotImplementedError

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both; may change and return this one."""
        raise NotImplementedError

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """Return a few numbers for a line of the log, by their names."""
        raise NotImplementedError

    @abstractmethod
    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        raise NotImplementedError


class KVConnectorPromMetrics:
    """A connector's own metrics: made once, then updated with the data of every step.

    metric_types: the classes to use for Gauge, Counter and Histogram. per_engine_labelvalues: the
    values of ``labelnames`` for each engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    def make_per_engine(self, metric: PromMetric) -> dict[int, PromMetric]:
        """Return the metric with the labels of each engine, by engine index."""
        return {
            index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the ``data`` of stats."""
        raise NotImplementedError


class KVConnectorLogging:
    """Adds up the stats between two lines of the log."""

    def __init__(self, kv_transfer_config: KVTransferConfig | None) -> None:
        self._config = kv_transfer_config
        self._connector_class = _class_of(kv_transfer_config)
        self._stats: KVConnectorStats | None = None
        self._has_warned = False

    def reset(self) -> None:
        """Forget the sums."""
        self._stats = None

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Take the ``data`` of stats."""
        if self._connector_class is None or self._config is None:
            return
        try:
            own = deepcopy(transfer_stats_data)  # adding up may change it
            stats = self._connector_class.stats_of_config(self._config, own)
            if stats is None:
                raise ValueError("build_kv_connector_stats returned None for them")
            self._stats = stats if self._stats is None else self._stats.aggregate(stats)
        except Exception as error:
            self._warn(error)

    def take_line(self) -> str:
        """Return ``name=value`` of all counts since the last call; "" if nothing was counted."""
        stats, self._stats = self._stats, None
        try:
            if stats is None or stats.is_empty():
                return ""
            return ", ".join(f"{name}={value}" for name, value in stats.reduce().items())
        except Exception as error:
            self._warn(error)
            return ""

    def log(self, log_fn: Callable[..., object] = logger.info) -> None:
        """Write the line, if there is one."""
        line = self.take_line()
        if line:
            log_fn("KV Transfer metrics: %s", line)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("stats of the KV connector are not logged: %s", error)


class KVConnectorPrometheus:
    """The connector's metrics in a registry; does nothing for a connector without metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.prom_metrics: KVConnectorPromMetrics | None = None
        self._has_warned = False
        connector_class = _class_of(vllm_config.kv_transfer_config)
        if connector_class is not None:
            self.prom_metrics = connector_class.build_prom_metrics(
                vllm_config, _types_for(registry), labelnames, per_engine_labelvalues
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the ``data`` of stats."""
        if self.prom_metrics is None:
            return
        try:
            self.prom_metrics.observe(transfer_stats_data, engine_idx)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.exception("stats of the KV connector do not reach Prometheus")


def _class_of(kv_transfer_config: KVTransferConfig | None) -> type[KVConnectorBase_V1] | None:
    if kv_transfer_config is None or not kv_transfer_config.is_kv_transfer_instance:
        return None
    return find_connector_class(kv_transfer_config)


def _types_for(registry: CollectorRegistry) -> dict[type[PromMetric], type[PromMetric]]:
    """Return metric classes whose instances register themselves in ``registry``."""
    kinds: tuple[type[Any], ...] = (Gauge, Counter, Histogram)
    return {
        kind: type(
            kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, registry=registry)}
        )
        for kind in kinds
    }
