"""Two engines behind one front end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import engine, greedy, random_prompts
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.exceptions import FailureKind
from vllm.hidden_states import FailedSample
from vllm.v1.engine.exceptions import EngineDeadError

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(19, [61, 5, 34, 17, 9, 80, 33, 2])
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**23}


@asynccontextmanager
async def two_engines(checkpoint: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    args = AsyncEngineArgs(str(checkpoint), data_parallel_size=2, **{**OPTIONS, **options})
    llm = AsyncLLM.from_engine_args(args)
    pids = [handle.pid for handle in llm._handles]
    try:
        await llm.start()
        yield llm
    finally:
        await llm.shutdown()
    assert not any(map(psutil.pid_exists, pids))


async def rows(llm: AsyncLLM) -> list[torch.Tensor]:
    return [one.hidden_states async for one in llm.extract(PROMPTS, layers=[0, 3, "norm"])]


async def tokens(llm: AsyncLLM, number: int, length: int = 6) -> list[int]:
    params = greedy(length)
    outputs = [one async for one in llm.generate(PROMPTS[number], params, f"request {number}")]
    return list(outputs[-1].outputs[0].token_ids)


def test_two_engines_have_the_values_of_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=77)
    with engine(checkpoint("llama"), **OPTIONS) as llm:
        expected = [one.hidden_states for one in llm.extract(PROMPTS, layers=[0, 3, "norm"])]
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        llm.update_weights(str(other))
        changed = [one.hidden_states for one in llm.extract(PROMPTS, layers=[0, 3, "norm"])]

    async def run() -> None:
        async with two_engines(checkpoint("llama")) as llm:
            assert all(map(torch.equal, await rows(llm), expected))
            found = await asyncio.gather(*(tokens(llm, i) for i in range(len(PROMPTS))))
            assert found == [list(output.outputs[0].token_ids) for output in outputs]
            used = await llm.collective_rpc(rank_functions.has_computed)
            assert used == [True, True]
            pids = await llm.collective_rpc(rank_functions.pid)
            assert pids == [handle.pid for handle in llm._handles]
            under_way = [asyncio.create_task(tokens(llm, i)) for i in range(len(PROMPTS))]
            await asyncio.sleep(0)
            await llm.pause_generation("keep")
            num_done = sum(task.done() for task in under_way)
            await asyncio.sleep(0.05)
            assert sum(task.done() for task in under_way) == num_done < len(PROMPTS)
            await llm.resume_generation()
            assert await asyncio.gather(*under_way) == found
            await llm.update_weights(str(other), mode="keep")
            assert all(map(torch.equal, await rows(llm), changed))
            assert llm.stats.num_prompt_tokens >= 3 * sum(
                len(prompt["prompt_token_ids"]) for prompt in PROMPTS
            )
            with pytest.raises(ValueError, match="no method 'nothing'"):
                await llm.collective_rpc("nothing")

    asyncio.run(run())


def test_an_engine_that_ends_takes_only_its_requests(checkpoint: Checkpoint) -> None:
    async def run() -> None:
        async with two_engines(checkpoint("llama")) as llm:
            expected = await rows(llm)
            first, second = (handle.pid for handle in llm._handles)
            before = llm.stats
            os.kill(first, signal.SIGSTOP)  # its requests stay under way
            found = llm.extract(PROMPTS, layers=[0, 3, "norm"], on_error="yield")
            task = asyncio.create_task(all_of(found))
            await asyncio.sleep(0.5)
            os.kill(first, signal.SIGKILL)
            results = await task
            failed = [one for one in results if isinstance(one, FailedSample)]
            assert 0 < len(failed) < len(PROMPTS)
            for one in failed:
                assert one.failure.kind is FailureKind.ENGINE_DEAD
                assert "engine 0 of 2" in one.reason
            for one, whole in zip(results, expected, strict=True):
                if not isinstance(one, FailedSample):
                    assert torch.equal(one.hidden_states, whole)
            await llm.check_health()
            assert llm.stats.num_prompt_tokens >= before.num_prompt_tokens > 0
            async with asyncio.timeout(30):
                while llm.stats.num_running or llm.stats.num_waiting:
                    await asyncio.sleep(0.01)
            assert all(map(torch.equal, await rows(llm), expected))
            assert await llm.collective_rpc(rank_functions.pid) == [second]
            os.kill(second, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await rows(llm)
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    asyncio.run(run())


async def all_of(samples: Any) -> list[Any]:
    return [one async for one in samples]


def test_refusals(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2: LLM has one engine"):
        LLM(str(checkpoint("llama")), data_parallel_size=2)

    async def run() -> None:
        with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
            async with two_engines(checkpoint("llama"), kv_cache_memory_bytes=2**12):
                pass

    asyncio.run(run())


def place(monkeypatch: pytest.MonkeyPatch, **values: int | str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"VLLM_DP_{name}", str(value))


def test_engines_of_a_program_are_placed_by_the_environment(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's server starts a process for each rank, with these variables and an LLM."""
    with engine(checkpoint("llama"), **OPTIONS) as llm:
        expected = [one.hidden_states for one in llm.extract(PROMPTS, layers=[3])]
    meeting = {"MASTER_IP": "127.0.0.1", "MASTER_PORT": 29500}
    place(monkeypatch, RANK=3, RANK_LOCAL=1, SIZE=4, **meeting)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with engine(checkpoint("llama"), **OPTIONS) as llm:
        found = [one.hidden_states for one in llm.extract(PROMPTS, layers=[3])]
        parallel = llm.llm_engine.vllm_config.parallel_config
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (parallel.data_parallel_rank, parallel.data_parallel_size) == (3, 4)
    assert parallel.place_on_machine == (1, 4)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"RANK": 2, "SIZE": 2}, {}, "VLLM_DP_RANK=2, .*, VLLM_DP_SIZE=2: ranks count from 0"),
        ({"RANK": 1}, {}, "VLLM_DP_RANK=1, .*, VLLM_DP_SIZE=1: ranks count from 0"),
        ({"RANK": 0, "RANK_LOCAL": 1, "SIZE": 2}, {}, "the local one is not larger"),
        ({"SIZE": "two"}, {}, "VLLM_DP_SIZE='two': use a whole number"),
        ({"SIZE": 2}, {"data_parallel_size": 3}, "data_parallel_size=3 has to be the same"),
        (
            {"SIZE": 2},
            {"enable_expert_parallel": True},
            "enable_expert_parallel with data_parallel_size=2: .* share no experts",
        ),
        ({"SIZE": 2}, {"tensor_parallel_size": 2, "nnodes": 2}, "nodes share one engine"),
    ],
)
def test_places_that_do_not_fit(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, int | str],
    options: dict[str, Any],
    message: str,
) -> None:
    place(monkeypatch, **values)
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **OPTIONS, **options)


def test_servers_take_no_place_from_the_environment(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, SIZE=2)
    with pytest.raises(ValueError, match="VLLM_DP_SIZE=2 is for programs that make an LLM"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint("llama"))))
