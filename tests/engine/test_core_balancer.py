"""The choice of an engine, and the front end of many engines, which are simulated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks.front_end import measure, simulated_cores
from tests.engine.harness import greedy
from tests.engine.test_data_parallel import two_engines
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_balancer import (
    MOST_PREFIX_TOKENS,
    MOST_PREFIXES,
    PREFIX_TOKENS,
    SPARE_REQUESTS,
    LeastLoaded,
    SharedPrefix,
)

Checkpoint = Callable[..., Path]


def request(tokens: list[int], **values: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=1)
    given: dict[str, Any] = {"prompt_token_ids": tokens, "sampling_params": params, **values}
    return EngineCoreRequest(request_id="r", arrival_time=0.0, **given)


def prompt(*seeds: int, length: int = PREFIX_TOKENS) -> list[int]:
    """A prompt of parts, each of which is the same for the same seed."""
    return [random.Random(f"{seed} {i}").randrange(1000) for seed in seeds for i in range(length)]


def test_the_engine_with_the_fewest_requests() -> None:
    balancer = LeastLoaded()
    for loads, alive, expected in (
        ([0, 0, 0], [0, 1, 2], 0),
        ([2, 1, 1], [0, 1, 2], 1),
        ([0, 5, 4], [1, 2], 2),
    ):
        assert balancer.choose(request([1]), alive, loads) == expected


def test_the_engine_with_the_longest_prefix() -> None:
    balancer, alive = SharedPrefix(), [0, 1, 2, 3]
    idle, busy = [0, 0, 0, 0], [1, 0, 0, 0]
    assert balancer.choose(request(prompt(1, 2)), alive, busy) == 1
    assert balancer.choose(request(prompt(3, 4)), alive, [1, 1, 0, 0]) == 2
    assert balancer.choose(request(prompt(1, 5)), alive, idle) == 1
    assert balancer.choose(request([*prompt(3, 4, 5), 1]), alive, idle) == 2
    assert balancer.choose(request(prompt(4, 3)), alive, [1, 1, 1, 0]) == 3, "not the same prefix"
    assert balancer.choose(request(prompt(1)[:-1]), alive, idle) == 0, "too short"
    # The prefix 1 is newer on another engine, 1 2 is where it was.
    full = [0, 3 * SPARE_REQUESTS, 0, 0]
    assert balancer.choose(request(prompt(1, 6)), alive, full) == 0
    assert balancer.choose(request(prompt(1, 7)), alive, idle) == 0
    assert balancer.choose(request(prompt(1, 2, 8)), alive, idle) == 1
    assert balancer.choose(request(prompt(1, 2, 8)), [0, 2, 3], idle) == 0, "1 has ended"
    balancer.forget()
    assert balancer.choose(request(prompt(3, 4)), alive, idle) == 0


def test_what_keeps_requests_from_sharing() -> None:
    balancer, alive = SharedPrefix(), [0, 1]
    tokens, lora = prompt(1), LoRARequest("other", 1, "/nowhere")
    assert balancer.choose(request(tokens, cache_salt="a"), alive, [1, 0]) == 1
    assert balancer.choose(request(tokens, cache_salt="a"), alive, [0, 0]) == 1
    assert balancer.choose(request(tokens, cache_salt="b"), alive, [0, 0]) == 0
    assert balancer.choose(request(tokens, cache_salt="a", lora_request=lora), alive, [0, 0]) == 0


def test_an_engine_gets_no_more_than_twice_as_many_requests() -> None:
    """All requests have one prefix, and none ends."""
    balancer, loads = SharedPrefix(), [0, 0, 0]
    tokens = prompt(1, 2)
    for _ in range(300):
        loads[balancer.choose(request(tokens), [0, 1, 2], loads)] += 1
        assert max(loads) <= 2 * min(loads) + SPARE_REQUESTS + 1
    assert min(loads) > 50


def test_memory_is_bounded_and_choices_are_the_same_again() -> None:
    def run() -> list[int]:
        balancer, rng = SharedPrefix(), random.Random(7)
        chosen, loads = [], [0] * 8
        for _ in range(600):
            length = rng.choice([10, 700, MOST_PREFIX_TOKENS + 999])
            tokens = [rng.randrange(4)] * PREFIX_TOKENS + rng.choices(range(1000), k=length)
            chosen.append(balancer.choose(request(tokens), range(8), loads))
            loads[chosen[-1]] += 1
            loads[rng.randrange(8)] = 0
            assert len(balancer._engine_of) <= MOST_PREFIXES
        assert len(balancer._engine_of) > MOST_PREFIXES // 2
        return chosen

    assert run() == run()


@pytest.mark.exhaustive
def test_shared_prefixes_are_found(checkpoint: Checkpoint) -> None:
    """Two families of prompts: each stays on the engine that had its first."""
    rng = random.Random(5)
    heads = [rng.choices(range(300), k=80) for _ in range(2)]

    async def run() -> None:
        async with two_engines(checkpoint("llama"), data_parallel_balancing="prefix") as llm:

            async def ask(number: int, tail: list[int]) -> int:
                tokens = {"prompt_token_ids": heads[number] + tail}
                name = f"{number} {tail}"
                outputs = [one async for one in llm.generate(tokens, greedy(2), name)]
                return int(outputs[-1].num_cached_tokens or 0)

            first = await asyncio.gather(ask(0, [1]), ask(1, [1]))
            assert first == [0, 0]
            found = [await ask(i % 2, [2, i]) for i in range(10)]
            assert found == [80] * 10
            await llm.reset_prefix_cache()
            assert await ask(1, [3]) == 0

    asyncio.run(run())
    with pytest.raises(ValueError, match="'prefix' needs enable_prefix_caching"):
        LLM(str(checkpoint("llama")), data_parallel_balancing="prefix", enable_prefix_caching=False)


@pytest.mark.exhaustive
def test_the_front_end_of_64_engines() -> None:
    """It handles 20,000 requests in a second of its CPU time (the machine may be busy)."""
    with simulated_cores(64) as cores:
        _, cpu_seconds = uvloop.run(measure(cores, 40_000, 2048, 64))
    assert 40_000 / cpu_seconds >= 20_000
