"""Prometheus reads the metrics: names, values, content types; two applications in one process."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.entrypoints.gate_harness import GateState, gate
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.pages import router
from vllm.entrypoints.openai.server_metrics import ServerMetrics
from vllm.exceptions import Failure, FailureKind
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.metrics.loggers import stats_line
from vllm.v1.metrics.prometheus import Histogram

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_steps=9,
    num_preemptions=1,
    kv_cache_usage=0.25,
    prefix_cache_queries=100,
    prefix_cache_hits=40,
    num_prompt_tokens=1000,
    num_generation_tokens=50,
    rows_written=900,
    bytes_written=12345,
    files_written=4,
    bytes_in_flight=77,
    write_seconds=0.5,
)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels without engine and model_name) -> value; those two are checked."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0"
            assert labels.pop("model_name") == "tiny"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def app_of(state: GateState) -> FastAPI:
    app = FastAPI()
    app.state.server = state
    app.include_router(router)
    return app


def test_counts_of_the_engine() -> None:
    state = GateState(ServerSettings(), stats=STATS)
    with gate(app_of, state) as server:
        answer = httpx.get(f"{server.url}/metrics")
        assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        plain = httpx.get(f"{server.url}/metrics/")
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    assert samples(plain.text).keys() >= found.keys()
    for name, value in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 1000,
        "vllm:generation_tokens_total": 50,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 40,
        "vllm:num_preemptions_total": 1,
        "vllm:hidden_states_rows_written_total": 900,
        "vllm:hidden_states_bytes_written_total": 12345,
        "vllm:hidden_states_files_written_total": 4,
        "vllm:hidden_states_bytes_in_flight": 77,
        "vllm:hidden_states_write_seconds_sum": 0.5,
        "vllm:hidden_states_write_seconds_count": 4,
        "vllm:time_to_first_token_seconds_count": 0,
        "vllm:inter_token_latency_seconds_count": 0,
        "vllm:time_per_output_token_seconds_count": 0,
        "vllm:e2e_request_latency_seconds_count": 0,
    }.items():
        assert found[name, ()] == value, name
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 0
    state.stats = EngineStats(num_running=1)  # read when asked, not kept
    assert next(iter(state.metrics.collect())).samples[0].value == 1


def output(
    tokens: int,
    reason: str | None,
    times: RequestMetrics | None,
    index: int = 0,
    failure: Failure | None = None,
) -> RequestOutput:
    why = None if failure is None else failure.message
    completion = CompletionOutput(index, "", list(range(tokens)), None, None, reason, why, failure)
    return RequestOutput("r", None, [1], None, [completion], reason is not None, times)


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics(EngineStats, "tiny")


def histogram(metrics: ServerMetrics, name: str) -> tuple[float, float]:
    """(count, sum)"""
    values = {
        sample.name: sample.value for family in metrics.collect() for sample in family.samples
    }
    return values[f"vllm:{name}_count"], values[f"vllm:{name}_sum"]


def test_latencies_of_a_request_in_one_piece(metrics: ServerMetrics) -> None:
    now = time.time()
    times = RequestMetrics(now - 10, now - 8, now - 2, now, first_scheduled_time=now - 9)
    metrics.start_request(now - 10, is_delta=False).take(output(4, "length", times))
    assert histogram(metrics, "time_to_first_token_seconds") == (1, pytest.approx(2))
    assert histogram(metrics, "inter_token_latency_seconds") == (3, pytest.approx(6))
    assert histogram(metrics, "e2e_request_latency_seconds") == (1, pytest.approx(10, abs=0.5))
    for phase, seconds in {"queue": 1, "prefill": 1, "decode": 6, "inference": 7}.items():
        name = f"request_{phase}_time_seconds"
        assert histogram(metrics, name) == (1, pytest.approx(seconds)), phase
    assert histogram(metrics, "request_prompt_tokens") == (1, 1)
    assert histogram(metrics, "request_generation_tokens") == (1, 4)
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize("is_delta", [True, False])
def test_latencies_of_a_stream(
    metrics: ServerMetrics, is_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    request = metrics.start_request(99.0, is_delta)
    times = RequestMetrics(99.0, 100.0, 100.0)
    request.take(output(1, None, times))
    clock[0] = 101.5
    request.take(output(1 if is_delta else 2, None, times))
    clock[0] = 102.0  # two tokens in half a second
    request.take(output(2 if is_delta else 4, None, times))
    clock[0] = 103.0
    request.take(output(0 if is_delta else 4, "stop", times))
    assert histogram(metrics, "time_to_first_token_seconds") == (1, 1.0)
    assert histogram(metrics, "inter_token_latency_seconds") == (3, 2.0)
    assert histogram(metrics, "e2e_request_latency_seconds") == (1, 4.0)
    assert histogram(metrics, "request_generation_tokens") == (1, 4)
    assert metrics.finished["stop"] == 1


def test_failures(metrics: ServerMetrics) -> None:
    full = "hidden states cannot be written to /x: No space left on device (free some space)"
    for failure in (
        Failure(FailureKind.DISK_FULL, full),
        Failure(FailureKind.DISK_FULL, full),
        Failure(FailureKind.ROWS_NOT_FINITE, "hidden states of token 3, layer 2 are not finite"),
        Failure(FailureKind.STEP_FAILED, "who knows"),
    ):
        request = metrics.start_request(time.time(), is_delta=False)
        request.take(output(0, "error", RequestMetrics(0.0), failure=failure))
    metrics.start_request(time.time(), is_delta=False).leave()
    assert metrics.failures == {"disk_full": 2, "values_not_finite": 1, "other": 1}
    assert metrics.finished == {"stop": 0, "length": 0, "abort": 1, "error": 4}
    assert abs(metrics.last_failure_time["disk_full"] - time.time()) < 5
    for kind, series in {
        FailureKind.NOT_PERMITTED: "not_permitted",
        FailureKind.ROWS_ALL_ZERO: "values_all_zero",
    }.items():
        failure = Failure(kind, "cannot be written to /x: Permission denied (...)")
        request = metrics.start_request(time.time(), is_delta=False)
        request.take(output(0, "error", RequestMetrics(0.0), failure=failure))
        assert metrics.failures[series] == 1


def test_continuations_end_one_by_one(metrics: ServerMetrics) -> None:
    request = metrics.start_request(time.time(), is_delta=True, num_choices=3)
    running = RequestOutput("r", None, [1], None, [], False)
    for index, reason in ((0, None), (1, "stop"), (2, None)):
        request.take(replace(running, outputs=output(2, reason, None, index).outputs))
    request.leave()
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 2, "error": 0}
    assert histogram(metrics, "request_generation_tokens") == (1, 2)
    assert histogram(metrics, "e2e_request_latency_seconds") == (0, 0)


def test_buckets_hold_the_smaller_ones() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(3.0, count=2)
    family = histogram.family("h", "about", {"engine": "0"})
    counts = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    assert counts == {"1.0": 2, "2.0": 3, "4.0": 5, "+Inf": 6}
    total = {s.name: s.value for s in family.samples}
    assert (total["h_count"], total["h_sum"]) == (6, 18.0)


def test_two_applications_in_one_process() -> None:
    first, second = GateState(ServerSettings()), GateState(ServerSettings())
    first.metrics.count_failure("disk_full")
    with gate(app_of, first) as one, gate(app_of, second) as two:
        assert "disk_full" in httpx.get(f"{one.url}/metrics").text
        assert "disk_full" not in httpx.get(f"{two.url}/metrics").text


def test_line_in_the_log() -> None:
    line = stats_line(EngineStats(), STATS, 10.0)
    assert "3 running, 2 waiting; prompts 100.0 tokens/s, generation 5.0 tokens/s" in line
    assert "pool 25.0 % in use; 4 files written" in line


def test_series_follow_the_rules_of_prometheus() -> None:
    """Names pass the rules of `promtool check metrics`, but for the colon, which is upstream's."""
    metrics = ServerMetrics(lambda: EngineStats(), "tiny")
    metrics.count_failure("disk_full")
    metrics.count_response(429, "/v1/completions")
    units = {"minutes", "hours", "days", "milliseconds", "kilobytes", "mebibytes", "percent"}
    for family in metrics.collect():
        name = family.name.removeprefix("vllm:")
        assert family.documentation, name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "no capitals, no other signs"
        words = name.split("_")
        assert not units & set(words), f"{name} has no base unit"
        assert not {"counter", "gauge", "histogram", "summary"} & set(words)
        assert words[-1] not in ("total", "count", "sum", "bucket", "info"), name
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            allowed = {
                "counter": {"_total"},
                "gauge": {""},
                "histogram": {"_bucket", "_sum", "_count"},
                "summary": {"_sum", "_count"},
            }[family.type]
            assert suffix in allowed, sample.name
            assert ("le" in sample.labels) == (suffix == "_bucket")


def test_promtool_finds_nothing_but_the_colons() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: prometheus)")
    state = GateState(ServerSettings(), stats=STATS)
    state.metrics.count_failure("disk_full")
    state.metrics.count_response(429, "/v1/completions")
    with gate(app_of, state) as server:
        text = httpx.get(f"{server.url}/metrics/").text
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    complaints = (done.stdout + done.stderr).splitlines()
    assert len(complaints) > 20
    assert all("should not contain ':'" in line for line in complaints), complaints


def test_a_clock_that_is_set_back_gives_no_negative_times() -> None:
    """A sum that falls looks like a restart of the server."""
    histogram = Histogram([0.1, 1.0])
    histogram.observe(0.5)
    histogram.observe(-3600.0)
    values = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in histogram.family("x", "about", {}).samples
    }
    assert values["x_sum", None] == 0.5
    assert values["x_bucket", "0.1"] == 1
