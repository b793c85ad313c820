"""Two engines that share experts: each has three or four of seven."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import engine, greedy
from tests.engine.test_data_parallel import OPTIONS, PROMPTS, tokens
from tests.models.checkpoints import make_checkpoint
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.exceptions import FailureKind
from vllm.hidden_states import ExtractRequest, FailedSample
from vllm.v1.engine.exceptions import EngineDeadError

Checkpoint = Callable[..., Path]
SIZES: dict[str, Any] = {"num_experts": 7, "intermediate_size": 256}
SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
LAYERS: tuple[list[int | str], ...] = ([0, 2, 4, "norm"], [1], [4], [0], [2, 3])
"""Passes of the two engines have different depths at the same time."""
REQUESTS = [
    ExtractRequest(prompt, layers=LAYERS[number % len(LAYERS)])
    for number, prompt in enumerate(PROMPTS * 2)
]


class Engines(NamedTuple):
    """Engines in an event loop of their own, which runs while a test awaits something."""

    llm: AsyncLLM
    runner: asyncio.Runner
    pids: list[int]

    def extract(self, requests: Any, **options: Any) -> list[Any]:
        return self.runner.run(all_of(self.llm.extract(requests, **options)))

    def tokens(self, numbers: Any) -> list[list[int]]:
        async def run() -> list[list[int]]:
            return await asyncio.gather(*(tokens(self.llm, number) for number in numbers))

        return self.runner.run(run())

    def rpc(self, *args: Any) -> list[Any]:
        return self.runner.run(self.llm.collective_rpc(args[0], args=args[1:]))


async def all_of(samples: Any) -> list[Any]:
    return [one async for one in samples]


@contextmanager
def shared(folder: Path, **options: Any) -> Iterator[Engines]:
    args = AsyncEngineArgs(str(folder), **{**OPTIONS, **SHARED, **options})
    with asyncio.Runner() as runner:
        llm = AsyncLLM.from_engine_args(args)
        children = {handle.pid for handle in llm._handles}
        try:
            runner.run(llm.start())
            processes = [psutil.Process(pid) for pid in children]
            children |= {one.pid for process in processes for one in process.children()}
            yield Engines(llm, runner, [handle.pid for handle in llm._handles])
        finally:
            runner.run(llm.shutdown())
    assert not any(map(psutil.pid_exists, children))


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("qwen3_moe", **SIZES)


class Expected(NamedTuple):
    samples: list[Any]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """The results of one process."""
    with engine(folder, expert_trace=True, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        lists = [list(output.outputs[0].token_ids) for output in outputs]
        return Expected(list(llm.extract(REQUESTS)), lists)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Engines]:
    with shared(folder, expert_trace=True, max_num_batched_tokens=24) as found:
        yield found


def check_rows(found: list[Any], expected: list[Any]) -> None:
    for ours, one in zip(found, expected, strict=True):
        assert torch.equal(ours.hidden_states, one.hidden_states)
        assert torch.equal(ours.tensors["expert_ids"], one.tensors["expert_ids"])


def test_rows_and_tokens_are_those_of_one_process(engines: Engines, expected: Expected) -> None:
    """All bits, in chunks of different sizes, beside passes that end early, and alone."""
    assert engines.rpc(rank_functions.own_experts) == [3, 4]
    check_rows(engines.extract(REQUESTS), expected.samples)
    assert engines.rpc(rank_functions.has_computed) == [True, True]
    check_rows(engines.extract(REQUESTS[:1]), expected.samples[:1])
    assert engines.tokens(range(len(PROMPTS))) == expected.tokens
    assert engines.tokens([3]) == [expected.tokens[3]]


def test_an_engine_without_requests_takes_part(engines: Engines, expected: Expected) -> None:
    before = engines.llm.stats
    for _ in range(30):
        assert engines.tokens([5]) == [expected.tokens[5]]
    steps = engines.llm.stats.num_steps - before.num_steps
    assert 30 * 6 <= steps < 30 * 10  # those of one engine: the other one counts none


def test_engines_without_work_rest(engines: Engines) -> None:
    processes = [psutil.Process(pid) for pid in engines.pids]
    time.sleep(0.1)
    before = [sum(one.cpu_times()[:2]) for one in processes]
    time.sleep(0.5)
    after = [sum(one.cpu_times()[:2]) for one in processes]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 0.1


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_that_fails_ends_its_requests_alone(
    number: int, engines: Engines, expected: Expected
) -> None:
    engines.rpc(rank_functions.fail_on_engine, number)
    found = engines.extract(REQUESTS, on_error="yield")
    failed = [one for one in found if isinstance(one, FailedSample)]
    assert 0 < len(failed) < len(REQUESTS)
    assert {one.failure.kind for one in failed} <= {
        FailureKind.OUT_OF_MEMORY,
        FailureKind.STEP_FAILED,
    }
    check_rows(engines.extract(REQUESTS), expected.samples)


def test_an_engine_that_is_not_ready_fails_those_of_others(
    engines: Engines, folder: Path, expected: Expected
) -> None:
    engines.rpc(rank_functions.break_weights, 1)
    with pytest.raises(Exception, match="engine 1 of 2, which has some of the experts"):
        engines.extract(REQUESTS[:1])
    engines.runner.run(engines.llm.update_weights(str(folder)))
    check_rows(engines.extract(REQUESTS[:3]), expected.samples[:3])


def test_pauses_sleep_and_new_weights(
    engines: Engines, folder: Path, expected: Expected, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path, "qwen3_moe", seed=77, **SIZES)
    llm = engines.llm

    async def run() -> None:
        under_way = [asyncio.create_task(tokens(llm, i)) for i in range(len(PROMPTS))]
        await asyncio.sleep(0.01)
        await llm.pause_generation("keep")
        await asyncio.sleep(0.05)
        await llm.resume_generation()
        assert await asyncio.gather(*under_way) == expected.tokens
        await llm.sleep()
        await llm.wake_up()
        await llm.update_weights(str(other), mode="keep")
        assert await tokens(llm, 0) != expected.tokens[0]
        await llm.update_weights(str(folder))
        assert await tokens(llm, 0) == expected.tokens[0]

    engines.runner.run(run())


def test_an_engine_that_is_killed_ends_all(engines: Engines) -> None:
    """Last, because nothing is left of the engines."""

    async def run() -> None:
        under_way = [
            asyncio.create_task(tokens(engines.llm, number)) for number in range(len(PROMPTS))
        ]
        await asyncio.sleep(0)
        os.kill(engines.pids[1], signal.SIGKILL)
        results = await asyncio.gather(*under_way, return_exceptions=True)
        errors = [one for one in results if not isinstance(one, list)]
        assert errors
        for one in errors:
            assert isinstance(one, EngineDeadError)
            assert "engine 1 of 2" in str(one)
            assert "had some of the experts" in str(one)
        with pytest.raises(EngineDeadError, match="engine 1 of 2"):
            await tokens(engines.llm, 0)

    engines.runner.run(run())
    for pid in engines.pids:
        psutil.Process(pid).wait(10) if psutil.pid_exists(pid) else None
