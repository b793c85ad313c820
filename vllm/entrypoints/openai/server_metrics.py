"""Metrics of a server: those of its engine, and of its HTTP responses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from vllm.entrypoints.openai.errors import STATUS_CLIENT_GONE
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.metrics.prometheus import EngineMetrics


class ServerMetrics(EngineMetrics):
    """The metrics of an engine and of its server's HTTP responses."""

    def __init__(self, read_stats: Callable[[], EngineStats], model_name: str) -> None:
        super().__init__(read_stats, model_name)
        self.responses: Counter[int] = Counter()
        """HTTP status -> number of responses."""
        self.damaged_files = 0
        """Number of downloads that were refused because the file has changed."""

    def count_response(self, status: int) -> None:
        """Count a response; errors also count as failures of that status."""
        self.responses[status] += 1
        if status >= 400 and status != STATUS_CLIENT_GONE:
            self.last_failure_time[f"http_{status}"] = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        yield from super().collect()
        counts = self.responses
        yield self.family(CounterMetricFamily, "http_responses", "HTTP responses", counts, "status")
        about, damaged = "Downloads refused: damaged files", self.damaged_files
        yield self.family(CounterMetricFamily, "hidden_states_damaged_files", about, damaged)
