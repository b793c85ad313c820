"""Metrics of an engine for Prometheus: its counts, latencies of requests, failures.

Names are upstream's where the same metric exists there; those about hidden states and
failures are our own. Counts of the engine are read from its last report when Prometheus
asks for them, so they cost requests nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPrometheus
from vllm.exceptions import FailureKind
from vllm.outputs import RequestMetrics, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.engine.input_processor import ProcessedInput

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_FAILURES = {
    FailureKind.ROWS_NOT_FINITE: "values_not_finite",
    FailureKind.LOGITS_NOT_FINITE: "values_not_finite",
    FailureKind.ROWS_ALL_ZERO: "values_all_zero",
    FailureKind.DISK_FULL: "disk_full",
    FailureKind.NOT_PERMITTED: "not_permitted",
    FailureKind.WRITE_FAILED: "write_failed",
}
"""Kinds of failure that have their own series; all others are "other"."""

_ENGINE_METRICS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Running requests", "num_running"),
    (GaugeMetricFamily, "num_requests_waiting", "Waiting requests", "num_waiting"),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the pool in use", "kv_cache_usage"),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens computed or found", "num_prompt_tokens"),
    (CounterMetricFamily, "generation_tokens", "Tokens generated", "num_generation_tokens"),
    (CounterMetricFamily, "num_preemptions", "Preempted requests", "num_preemptions"),
    (CounterMetricFamily, "prefix_cache_queries", "Tokens looked up", "prefix_cache_queries"),
    (CounterMetricFamily, "prefix_cache_hits", "Tokens found", "prefix_cache_hits"),
    (CounterMetricFamily, "num_engine_steps", "Steps of the engine", "num_steps"),
    (CounterMetricFamily, "hidden_states_rows_written", "Rows in files", "rows_written"),
    (CounterMetricFamily, "hidden_states_bytes_written", "Bytes of rows in files", "bytes_written"),
    (CounterMetricFamily, "hidden_states_files_written", "Files completed", "files_written"),
    (GaugeMetricFamily, "hidden_states_bytes_in_flight", "Bytes to write", "bytes_in_flight"),
)
"""Metrics from the engine's report: kind, name, help text, field of the report."""


_PHASES = {
    "queue": "Arrival to first step",
    "prefill": "First step to first token",
    "decode": "First token to last token",
    "inference": "First step to last token",
}
"""Phases of requests that ended; the last three only of those that got tokens."""


class Histogram:
    """Counts of values up to each of ``bounds``, ascending. For one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        value = max(0.0, value)  # a time is negative if the clock of the machine was set back
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def __add__(self, other: Histogram) -> Histogram:
        total = Histogram(self._bounds)
        total._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        total._sum = self._sum + other._sum
        return total

    def family(self, name: str, about: str, labels: dict[str, str]) -> Metric:
        """Return it in Prometheus' form, in which each bucket includes the smaller ones."""
        family = HistogramMetricFamily(name, about, labels=list(labels))
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


def _total(one: Any, other: Any) -> Any:
    """Return the sum of counts of two processes; of times the later one."""
    if isinstance(one, Histogram):
        return one + other
    if isinstance(one, Counter):  # a sum of counters has no zeros
        return Counter({key: one[key] + other[key] for key in {**one, **other}})
    if isinstance(one, dict):
        return {
            key: _total(one[key], other[key]) if key in one and key in other else value
            for key, value in {**one, **other}.items()
        }
    return max(one, other)


class RequestTimes:
    """Latencies of one request, measured from its outputs as they come."""

    def __init__(
        self, metrics: EngineMetrics, arrival_time: float, is_delta: bool, num_choices: int
    ) -> None:
        self._metrics = metrics
        self._arrival_time = arrival_time
        self._is_delta = is_delta
        self._num_running = num_choices
        self._num_tokens: Counter[int] = Counter()
        self._last_token_time: dict[int, float] = {}
        self._has_token = False

    def take(self, output: RequestOutput) -> None:
        """Count one output, and with the last one the request."""
        now = time.time()
        for completion in output.outputs:
            before = self._num_tokens[completion.index]
            num_tokens = len(completion.token_ids) + (before if self._is_delta else 0)
            if num_tokens > before:
                self._num_tokens[completion.index] = num_tokens
                self._take_tokens(completion.index, num_tokens - before, before > 0, output, now)
            if completion.finish_reason is not None:
                self._num_running -= 1
                self._metrics.generation_lengths.observe(self._num_tokens[completion.index])
                self._metrics.finished[completion.finish_reason] += 1
            if completion.failure is not None:
                self._metrics.count_failure(_FAILURES.get(completion.failure.kind, "other"))
        if output.finished:
            self._metrics.request_seconds.observe(now - self._arrival_time)
            self._take_phases(output.metrics)
            self._metrics.prompt_lengths.observe(len(output.prompt_token_ids or ()))

    def _take_tokens(
        self, index: int, num_new: int, not_first: bool, output: RequestOutput, now: float
    ) -> None:
        """Count new tokens of one continuation; those that come together share their mean gap."""
        times = output.metrics
        if not_first:
            gap = (now - self._last_token_time[index]) / num_new
            self._metrics.token_seconds.observe(gap, num_new)
        elif times is not None and times.first_token_time is not None:
            if not self._has_token:
                wait = times.first_token_time - self._arrival_time
                self._metrics.first_token_seconds.observe(wait)
            if num_new > 1 and times.last_token_time is not None:
                gap = (times.last_token_time - times.first_token_time) / (num_new - 1)
                self._metrics.token_seconds.observe(gap, num_new - 1)
        self._has_token = True
        self._last_token_time[index] = now

    def _take_phases(self, times: RequestMetrics | None) -> None:
        """Count an ended request's time in the queue and, if it got tokens, its other phases."""
        if times is None or times.first_scheduled_time is None:
            return
        scheduled, phases = times.first_scheduled_time, self._metrics.phases
        phases["queue"].observe(scheduled - self._arrival_time)
        first, last = times.first_token_time, times.last_token_time
        if first is not None and last is not None:
            phases["prefill"].observe(first - scheduled)
            phases["decode"].observe(last - first)
            phases["inference"].observe(last - scheduled)

    def refuse(self) -> None:
        """Forget the continuations: the engine refused the request, so that none began."""
        self._num_running = 0

    def leave(self) -> None:
        """End the measurement: continuations that have not ended count as aborted."""
        self._metrics.finished["abort"] += self._num_running


class EngineMetrics(Collector):
    """All metrics of one engine; a Prometheus collector with its own registry.

    ``read_stats`` gives the engine's last report. For the event loop's thread only.
    """

    COUNTED: ClassVar[tuple[str, ...]] = (
        *("first_token_seconds", "token_seconds", "request_seconds", "phases"),
        *("prompt_lengths", "generation_lengths", "finished", "failures", "last_failure_time"),
    )
    """Attributes that processes of one server count apart."""

    def __init__(
        self, read_stats: Callable[[], EngineStats], model_name: str, engine: str = "0"
    ) -> None:
        self._read_stats = read_stats
        self._labels = {"engine": engine, "model_name": model_name}
        self.first_token_seconds = Histogram(FIRST_TOKEN_BUCKETS)
        self.token_seconds = Histogram(TOKEN_BUCKETS)
        self.request_seconds = Histogram(REQUEST_BUCKETS)
        self.phases = {phase: Histogram(REQUEST_BUCKETS) for phase in _PHASES}
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.generation_lengths = Histogram(LENGTH_BUCKETS)
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.failures: Counter[str] = Counter()
        self.last_failure_time: dict[str, float] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def counts(self) -> dict[str, Any]:
        """Return everything that is counted in this process, to be sent to another."""
        return {name: getattr(self, name) for name in self.COUNTED}

    def add_counts(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of another process."""
        for name, value in counts.items():
            setattr(self, name, _total(getattr(self, name), value))

    def follow_connector(self, vllm_config: VllmConfig) -> Callable[[dict[str, Any]], None]:
        """Add the KV connector's own metrics; returns the function that takes its stats."""
        values: dict[int, list[object]] = {0: list(self._labels.values())}
        connector = KVConnectorPrometheus(vllm_config, list(self._labels), values, self.registry)
        return connector.observe

    def start_request(
        self, arrival_time: float, is_delta: bool, num_choices: int = 1
    ) -> RequestTimes:
        """Follow one request. ``is_delta``: its outputs carry only what is new."""
        return RequestTimes(self, arrival_time, is_delta, num_choices)

    def count_failure(self, reason: str) -> None:
        """Count a request that failed for a reason of this class."""
        self.failures[reason] += 1
        self.last_failure_time[reason] = time.time()

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for kind, name, about, field in _ENGINE_METRICS:
            yield self.family(kind, name, about, getattr(stats, field))
        for name, about, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", self.first_token_seconds),
            ("inter_token_latency_seconds", "Token to next token", self.token_seconds),
            ("time_per_output_token_seconds", "Token to next token", self.token_seconds),
            ("e2e_request_latency_seconds", "Arrival to the end", self.request_seconds),
            ("request_prompt_tokens", "Tokens of a prompt", self.prompt_lengths),
            ("request_generation_tokens", "Tokens of a continuation", self.generation_lengths),
        ):
            yield histogram.family(f"vllm:{name}", about, self._labels)
        for phase, about in _PHASES.items():
            yield self.phases[phase].family(
                f"vllm:request_{phase}_time_seconds", about, self._labels
            )
        about = "Time that writer threads spent on a file"
        seconds = SummaryMetricFamily(
            "vllm:hidden_states_write_seconds", about, labels=list(self._labels)
        )
        seconds.add_metric(list(self._labels.values()), stats.files_written, stats.write_seconds)
        yield seconds
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        ended, failed = "Continuations that ended, by reason", "Accepted requests that failed"
        yield self.family(counter, "request_success", ended, self.finished, "finished_reason")
        yield self.family(counter, "request_failures", failed, self.failures, "reason")
        yield self.family(
            *(gauge, "last_failure_timestamp_seconds", "Unix time of the last failure"),
            *(self.last_failure_time, "reason"),
        )

    def family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        about: str,
        values: Mapping[Any, float] | float,
        *more: str,
    ) -> Metric:
        """Return a metric with one value, or with one for each value of the labels ``more``.

        Keys of ``values`` are values of the label, or tuples of them for several labels.
        """
        family = kind(f"vllm:{name}", about, labels=[*self._labels, *more])
        own = list(self._labels.values())
        if isinstance(values, Mapping):
            for key, value in values.items():
                parts = key if isinstance(key, tuple) else (key,)
                family.add_metric([*own, *map(str, parts)], value)
        else:
            family.add_metric(own, values)
        return family


class MeteredAsyncLLM(AsyncLLM):
    """An engine whose requests are timed."""

    metrics: EngineMetrics
    """Set before the first request."""

    async def run(self, processed: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        request = processed.request
        params = request.sampling_params
        is_delta = params.output_kind is RequestOutputKind.DELTA
        times = self.metrics.start_request(request.arrival_time, is_delta, params.n)
        try:
            async with aclosing(super().run(processed)) as outputs:
                async for output in outputs:
                    times.take(output)
                    yield output
        except ValueError:
            times.refuse()
            raise
        finally:
            times.leave()
