"""Metrics of a server: those of its engine, of its HTTP responses and of its storage folder."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm.entrypoints.openai.errors import STATUS_CLIENT_GONE
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.metrics.prometheus import EngineMetrics

if TYPE_CHECKING:
    from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore


class ServerMetrics(EngineMetrics):
    """The metrics of an engine, of its server's HTTP responses and of its storage folder."""

    COUNTED = (*EngineMetrics.COUNTED, "responses", "errors", "last_error_time")

    def __init__(
        self, read_stats: Callable[[], EngineStats], model_name: str, engine: str = "0"
    ) -> None:
        super().__init__(read_stats, model_name, engine)
        self.start_time = time.time()
        self.responses: Counter[int] = Counter()
        """HTTP status -> number of responses."""
        self.errors: Counter[tuple[str, int]] = Counter()
        """Endpoint and HTTP status -> number of responses, for errors."""
        self.last_error_time: dict[tuple[str, int], float] = {}
        self.damaged_files = 0
        """Number of downloads that were refused because the file has changed."""
        self.store: HiddenStatesStore | None = None
        self.disk_free_bytes: int | None = None
        """Room on the disk of the storage folder; None: there is no folder."""
        self.of_others: list[dict[str, Any]] = []
        """Counts of the server's other HTTP processes."""

    def count_response(self, status: int, endpoint: str) -> None:
        """Count a response; errors also count as failures of that status, and of the endpoint."""
        self.responses[status] += 1
        if status >= 400 and status != STATUS_CLIENT_GONE:
            self.errors[endpoint, status] += 1
            self.last_failure_time[f"http_{status}"] = time.time()
            self.last_error_time[endpoint, status] = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        total = copy.copy(self)
        for counts in self.of_others:
            total.add_counts(counts)
        return total._collect()

    def _collect(self) -> Iterator[Metric]:
        yield from super().collect()
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        counts, labels = self.responses, ("endpoint", "status")
        yield self.family(counter, "http_responses", "HTTP responses", counts, "status")
        yield self.family(counter, "http_errors", "HTTP responses >= 400", self.errors, *labels)
        about, times = "Unix time of the last HTTP error", self.last_error_time
        yield self.family(gauge, "last_http_error_timestamp_seconds", about, times, *labels)
        about = "Unix time of the server's start"
        yield self.family(gauge, "start_timestamp_seconds", about, self.start_time)
        about, damaged = "Downloads refused: damaged files", self.damaged_files
        yield self.family(counter, "hidden_states_damaged_files", about, damaged)
        if self.disk_free_bytes is not None:
            about = "Room on the disk of the storage folder"
            yield self.family(gauge, "hidden_states_disk_free_bytes", about, self.disk_free_bytes)
        if self.store is not None:
            name, about = "hidden_states_kept", "Files that the server may remove"
            yield self.family(gauge, f"{name}_files", about, self.store.num_files)
            yield self.family(gauge, f"{name}_bytes", about, self.store.num_bytes)
            if math.isfinite(quota := self.store.quota_bytes):
                about = "Most bytes of these files"
                yield self.family(gauge, "hidden_states_quota_bytes", about, quota)
