"""Several threads call one engine: their requests share its steps, nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    check_nothing_is_left,
    core_of,
    engine,
    greedy,
    random_prompts,
    with_output_tokens,
)
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.shared_engine import SharedEngine, _Turns
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Checkpoint = Callable[..., Path]
PROMPTS = [prompt["prompt_token_ids"] for prompt in random_prompts(12, [5, 33, 70, 1, 130, 16])]
SECONDS = 60


@pytest.fixture(params=["llama", "qwen3_5"])
def llm(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[LLM]:
    """Several steps a call."""
    with engine(checkpoint(request.param), max_num_batched_tokens=48) as made:
        yield made


def rows(llm: LLM, **options: Any) -> list[torch.Tensor]:
    return [sample.rows() for sample in llm.extract(PROMPTS, [1, -1], **options)]


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in PROMPTS], greedy(9), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_no_garbage_is_collected_in_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    in_steps, before, step = [], gc.get_threshold(), llm.llm_engine.step
    stepping = False

    def watched_step() -> list[Any]:
        nonlocal stepping
        stepping = True
        outputs = step()
        stepping = False
        return outputs

    def note(phase: str, info: dict[str, Any]) -> None:
        in_steps.append(stepping)

    monkeypatch.setattr(llm.llm_engine, "step", watched_step)

    gc.callbacks.append(note)
    gc.set_threshold(9, 3, 3)
    try:
        rows(llm)
        tokens(llm)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert in_steps and not any(in_steps) and gc.isenabled()


def test_calls_from_many_threads_get_their_own_results(llm: LLM) -> None:
    expected_rows, expected_tokens = rows(llm), tokens(llm)
    num_steps = core_of(llm).stats().num_steps
    alone = [rows, tokens]
    for call in alone:
        call(llm)
    steps_alone = (core_of(llm).stats().num_steps - num_steps) // len(alone)
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait(SECONDS)
        for _ in range(3):
            if number % 2:
                assert tokens(llm) == expected_tokens
            else:
                for found, known in zip(rows(llm), expected_rows, strict=True):
                    assert torch.equal(found, known)

    before = core_of(llm).stats().num_steps
    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, number) for number in range(6)]:
            future.result(SECONDS)
    # The calls were in the same steps, not one after another.
    assert core_of(llm).stats().num_steps - before < 18 * steps_alone
    check_nothing_is_left(llm)


def test_iterators_that_take_turns(llm: LLM) -> None:
    """One consumer that never asks again does not stop the others."""
    expected = rows(llm)
    stopped = llm.extract(PROMPTS * 3, [1, -1], max_in_flight=3)
    next(stopped)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(rows, llm) for _ in range(2)]:
            for found, known in zip(future.result(SECONDS), expected, strict=True):
                assert torch.equal(found, known)
    assert len(list(stopped)) == 3 * len(PROMPTS) - 1


def test_an_iterator_that_is_collected_inside_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector closes it on whichever thread runs, in the middle of anything."""
    expected = rows(llm)
    dropped: list[Any] = []
    execute = GPUModelRunner.execute_model

    def collect_and_execute(runner: GPUModelRunner, *arguments: Any) -> Any:
        dropped.clear()
        gc.collect()
        return execute(runner, *arguments)

    monkeypatch.setattr(GPUModelRunner, "execute_model", collect_and_execute)
    for _ in range(3):
        iterator = llm.extract(PROMPTS, [0])
        next(iterator)
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        dropped.append(cycle)
        del iterator, cycle
        for found, known in zip(rows(llm), expected, strict=True):
            assert torch.equal(found, known)
    check_nothing_is_left(llm)


def test_an_interrupt_ends_one_call_and_what_was_in_its_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm)
    others_wait = threading.Event()
    execute = GPUModelRunner.execute_model

    def interrupted(runner: GPUModelRunner, *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and others_wait.is_set():
            monkeypatch.setattr(GPUModelRunner, "execute_model", execute)
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
        return execute(runner, *arguments)

    monkeypatch.setattr(GPUModelRunner, "execute_model", interrupted)

    def work() -> list[tuple[str | None, Any]]:
        others_wait.set()
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, with_output_tokens(50), use_tqdm=False)
        return [(one.outputs[0].finish_reason, one.outputs[0].stop_reason) for one in outputs]

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(work)
        with pytest.raises(KeyboardInterrupt):
            _ = [tokens(llm) for _ in range(1000)]
        for reason in other.result(SECONDS):
            assert reason in {("length", None), ("abort", "interrupted")}
    assert tokens(llm) == expected
    check_nothing_is_left(llm)


def test_a_shutdown_ends_the_calls_of_other_threads(checkpoint: Checkpoint) -> None:
    llm = LLM(str(checkpoint("llama")), max_num_batched_tokens=16)
    with ThreadPoolExecutor(3) as threads:
        started = threading.Barrier(4)

        def work() -> None:
            started.wait(SECONDS)
            while True:
                rows(llm)

        calls = [threads.submit(work) for _ in range(3)]
        started.wait(SECONDS)
        time.sleep(0.2)
        llm.shutdown()
        for call in calls:
            with pytest.raises(RuntimeError, match="shut down"):
                call.result(SECONDS)


def test_a_failure_is_its_callers(llm: LLM) -> None:
    expected = rows(llm)

    def fail() -> None:
        with pytest.raises(ValueError, match="prompt 0: positions holds 900"):
            list(llm.extract(PROMPTS, [0], [900], on_error="raise"))
        with pytest.raises(ValueError, match="prompt 2: "):
            llm.generate([[1], [2], []], greedy(1), use_tqdm=False)

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(fail)
        for _ in range(3):
            for found, known in zip(rows(llm), expected, strict=True):
                assert torch.equal(found, known)
        failing.result(SECONDS)
    check_nothing_is_left(llm)


def test_outputs_that_somebody_else_takes_are_missed(llm: LLM) -> None:
    """LLM.llm_engine stepped by hand beside a call: an error, no hang."""
    iterator = llm.extract(PROMPTS, [0])
    next(iterator)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    with pytest.raises(RuntimeError, match="takes the outputs"):
        list(iterator)
    check_nothing_is_left(llm)


def test_turns_are_taken_in_order() -> None:
    turns, order = _Turns(), []
    assert turns.take_if_free() and turns.is_mine and not turns.take_if_free()

    def wait(number: int) -> None:
        turns.take()
        order.append(number)
        turns.end()

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        while len(turns._waiting) <= number:
            time.sleep(0.001)
    with pytest.raises(RuntimeError, match="inside a step"):
        turns.take()
    turns.end()
    for thread in threads:
        thread.join(SECONDS)
    assert order == [0, 1, 2, 3, 4] and turns.take_if_free()


def test_an_interrupt_while_waiting_for_a_turn(llm: LLM) -> None:
    shared: SharedEngine = llm._engine
    main_thread = threading.main_thread().ident
    assert shared._turns.take_if_free() and main_thread is not None

    def interrupt() -> None:
        time.sleep(0.2)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        # The turn belongs to another thread, which gives it back after the interrupt.
        shared._turns._owner = -1
        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            rows(llm)
        shared._turns.end()
    assert len(rows(llm)) == len(PROMPTS)
    check_nothing_is_left(llm)


def test_an_async_engine_that_was_not_started_knows_no_request(checkpoint: Checkpoint) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint("llama"))))

    async def abort() -> None:
        await llm.abort("1")
        await llm.shutdown()

    asyncio.run(abort())
    assert llm.errored


def test_who_waits_for_an_aborted_request_is_told(checkpoint: Checkpoint) -> None:
    args = AsyncEngineArgs(model=str(checkpoint("llama")), max_model_len=512)
    llm = AsyncLLM.from_engine_args(args)

    async def work() -> None:
        endless = SamplingParams(n=2, temperature=1.0, max_tokens=500, ignore_eos=True)
        outputs = llm.generate({"prompt_token_ids": PROMPTS[0]}, endless, "a")
        assert not (await anext(outputs)).finished
        await llm.abort("a")
        *_, last = [output async for output in outputs]
        assert last.finished
        assert [choice.finish_reason for choice in last.outputs] == ["abort", "abort"]
        while llm.stats.num_running:
            await asyncio.sleep(0.01)
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await anext(llm.generate({"prompt_token_ids": PROMPTS[0]}, endless, "b"))

    asyncio.run(asyncio.wait_for(work(), SECONDS))


def test_an_async_engine_belongs_to_one_event_loop(checkpoint: Checkpoint) -> None:
    args = AsyncEngineArgs(model=str(checkpoint("llama")))
    llm = AsyncLLM.from_engine_args(args)

    async def extract() -> int:
        return len([sample async for sample in llm.extract(PROMPTS, [0])])

    async def refused() -> None:
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await extract()
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await llm.start()
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await llm.abort("1")
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await llm.reset_prefix_cache()
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            await llm.shutdown()

    async def work() -> None:
        calls = await asyncio.gather(extract(), extract())
        assert calls == [len(PROMPTS)] * 2
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(asyncio.run, refused())

        def from_a_thread() -> int:
            return asyncio.run_coroutine_threadsafe(extract(), loop).result(SECONDS)

        found = await asyncio.gather(*(asyncio.to_thread(from_a_thread) for _ in range(4)))
        assert found == [len(PROMPTS)] * 4

    asyncio.run(asyncio.wait_for(work(), SECONDS))

    async def too_late() -> None:
        with pytest.raises(RuntimeError, match=r"belongs to the event loop.* has ended"):
            await extract()
        await llm.shutdown()  # the loop has ended: the core has to end all the same

    asyncio.run(asyncio.wait_for(too_late(), SECONDS))
    assert not llm.is_running
