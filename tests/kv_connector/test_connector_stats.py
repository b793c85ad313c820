"""Counts of connectors reach the log and Prometheus; cache events reach those who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector import counting_connector
from tests.kv_connector.loading import OFFLOADING, only
from vllm import AsyncEngineArgs, SamplingParams
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.metrics.loggers import log_stats_forever
from vllm.v1.metrics.prometheus import EngineMetrics

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(91, [20, 30])


def counter(name: str = "CountingConnector") -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": counting_connector.__name__}


def multi(*parts: dict[str, Any]) -> dict[str, Any]:
    options = {"connectors": list(parts)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": options}


ALL = multi(counter(), OFFLOADING, counter("AnotherCounter"), counter())


def run(folder: Path, connector: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any], Any]:
    """Return what is reported of a call in this process: stats, events, and the engine's config."""
    told: list[dict[str, Any]] = []
    events: list[Any] = []
    with engine(folder, **only(connector)) as llm:
        llm.llm_engine.on_connector_stats.append(told.append)
        llm.llm_engine.on_kv_cache_events.append(events.extend)
        llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        config = core_of(llm).vllm_config
    return told, events, config


def line_of(config: Any, told: list[dict[str, Any]]) -> str:
    logged = KVConnectorLogging(config.kv_transfer_config)
    for data in told:
        logged.observe(data)
    line = logged.take_line()
    assert logged.take_line() == ""
    return line


def metrics_of(config: Any, told: list[dict[str, Any]]) -> dict[str, float]:
    metrics = EngineMetrics(EngineStats, "tiny")
    observe = metrics.follow_connector(config)
    for data in told:
        observe(data)
    lines = generate_latest(metrics.registry).decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:toy"))
    return {name: float(value) for name, value in found}


LABELS = 'engine="0",model_name="tiny"'


def test_one_connector(checkpoint: Checkpoint) -> None:
    told, events, config = run(checkpoint("llama"), counter())
    # Two requests, four layers, three steps; steps without tokens count nothing on the worker.
    assert [data["worker"] for data in told if "worker" in data] == [[8]] * 3
    steps = sum(len(data["scheduler"]) for data in told)
    assert steps >= 3
    assert sorted(line_of(config, told).split(", ")) == [f"scheduler sum={steps}", "worker sum=24"]
    found = metrics_of(config, told)
    assert found[f"vllm:toy_sizes_sum{{{LABELS}}}"] == 24
    bounds = {name: value for name, value in found.items() if "bucket" in name}
    assert list(bounds.values()) == [0, 3, 3]
    assert found[f"vllm:toy_steps_total{{{LABELS}}}"] == steps
    assert events == [BlockStored([b"CountingConnector"], None, [1, 2], 2, medium="CPU")] * steps


def test_those_of_a_multi_connector_are_kept_apart(checkpoint: Checkpoint) -> None:
    told, events, config = run(checkpoint("llama"), ALL)
    names = ["CountingConnector", "AnotherCounter", "CountingConnector#3"]
    assert set(told[0]) >= set(names)
    assert all(data[name]["data"]["worker"] == [8] for data in told[:3] for name in names)
    line = line_of(config, told)
    assert all(f"{name}.worker sum=24" in line for name in names)
    found = metrics_of(config, told)  # both of the class that has metrics
    assert found[f"vllm:toy_sizes_sum{{{LABELS}}}"] == 48
    stored = {event.block_hashes[0] for event in events}
    assert stored == {b"CountingConnector", b"AnotherCounter"}


def test_stats_of_registered_connectors_come_back_without_a_config() -> None:
    stats = MultiConnector.build_kv_connector_stats({"OffloadingConnector": {"data": {}}})
    assert stats is not None
    assert stats.is_empty()


def test_what_cannot_be_counted_costs_no_request(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(checkpoint("llama"), **only(counter("CannotCount"))) as llm:
        outputs = llm.generate(PROMPTS, greedy(3), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2
    assert caplog.text.count("of the KV connector are dropped") == 1


def test_across_processes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.v1.metrics.loggers.LOG_SECONDS", 0.02)
    told: list[dict[str, Any]] = []
    events: list[Any] = []
    arguments: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**24}
    args = AsyncEngineArgs(model=str(checkpoint("llama")), **arguments, **only(ALL))

    async def serve() -> Any:
        llm = AsyncLLM.from_engine_args(args)
        logged = KVConnectorLogging(llm.vllm_config.kv_transfer_config)
        llm.on_connector_stats += [told.append, logged.observe]
        llm.on_kv_cache_events.append(events.extend)
        log = asyncio.create_task(log_stats_forever(lambda: llm.stats, logged))
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        async for _ in llm.generate(PROMPTS[0], params, request_id="one"):
            pass
        await asyncio.sleep(0.1)
        log.cancel()
        await llm.shutdown()
        return llm.vllm_config

    with caplog.at_level("INFO", logger="vllm"):
        config = asyncio.run(serve())
    assert "CountingConnector#3.worker sum=" in caplog.text
    assert metrics_of(config, told)[f"vllm:toy_sizes_sum{{{LABELS}}}"] == 2 * 3 * 4
    assert BlockStored([b"AnotherCounter"], None, [1, 2], 2, medium="CPU") in events
