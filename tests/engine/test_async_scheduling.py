"""A step planned while the one before it runs gives what steps one by one give."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from vllm import LLM, SamplingParams, SteeringVector
from vllm.hidden_states import ExtractRequest, HiddenStatesSample
from vllm.outputs import RequestOutput
from vllm.v1.outputs import ModelRunnerOutput

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16, 17, 90]


def key_parts(outputs: list[RequestOutput]) -> list[Any]:
    """Everything but times."""
    return [
        (output.prompt_logprobs, [dataclasses.astuple(one) for one in output.outputs])
        for output in outputs
    ]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.parametrize("memory", [2**24, 260_000])
def test_tokens(family: str, memory: int, checkpoint: Checkpoint) -> None:
    """All kinds of sampling in one batch, unforeseen stops, a pool that preempts."""
    params = [
        greedy(30),
        greedy(11, min_tokens=3),
        SamplingParams(max_tokens=9, temperature=0.8, seed=5, ignore_eos=True),
        greedy(12, logprobs=2),
        greedy(8, prompt_logprobs=1),
        greedy(10, repetition_penalty=1.3),
        SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=list(range(0, 300, 9))),
        greedy(1),
    ]
    prompts = random_prompts(20, LENGTHS)
    found, preemptions = [], 0
    for async_scheduling in (False, True):
        with engine(
            checkpoint(family),
            async_scheduling=async_scheduling,
            kv_cache_memory_bytes=memory,
            max_model_len=200,
            max_num_batched_tokens=64,
        ) as llm:
            found.append(key_parts(llm.generate(prompts * 2, params * 2, use_tqdm=False)))
            found.append(key_parts(llm.generate(prompts, params, use_tqdm=False)))
            preemptions = core_of(llm).stats().num_preemptions
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert memory == 2**24 or family == "qwen3_5" or preemptions > 0


def test_plain_greedy_decoding_needs_no_more_steps(checkpoint: Checkpoint) -> None:
    steps = []
    for async_scheduling in (False, True):
        with engine(checkpoint("llama"), async_scheduling=async_scheduling) as llm:
            llm.generate(random_prompts(21, [9, 20]), greedy(40), use_tqdm=False)
            steps.append(core_of(llm).stats().num_steps)
    assert steps[1] <= steps[0] + 2


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_rows(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = random_prompts(22, LENGTHS)
    files, samples = [], []
    for async_scheduling in (False, True):
        arguments = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 48}
        extraction = extraction_config([0, 3, 1], tmp_path / str(async_scheduling))
        with engine(checkpoint(family), **arguments, **extraction) as llm:
            for params in (greedy(0), with_output_tokens(7)):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                files += [rows_of(output) for output in outputs]
        with engine(checkpoint(family), **arguments) as llm:
            for positions in ("all", "last", "every:5"):
                for sample in llm.extract(prompts, [0, 3, 1], positions, ordered=True):
                    assert isinstance(sample, HiddenStatesSample)
                    samples.append(sample.hidden_states)
    for rows in (files, samples):
        half = len(rows) // 2
        assert all(torch.equal(a, b) for a, b in zip(rows[:half], rows[half:], strict=True))


@pytest.mark.parametrize("where", ["start", "result"])
def test_a_step_that_fails_ends_its_requests_alone(
    where: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step cannot be started, or its result cannot be had, with another step under way."""
    prompts = random_prompts(23, [40, 40, 40])
    with engine(
        checkpoint("qwen3_5"), async_scheduling=True, max_num_batched_tokens=32, max_num_seqs=1
    ) as llm:
        expected = key_parts(llm.generate(prompts, greedy(6), use_tqdm=False))
        llm.reset_prefix_cache()
        break_step(llm, 3, where, monkeypatch)
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons.count("error") == 1
        good = [i for i, reason in enumerate(reasons) if reason != "error"]
        assert [key_parts(outputs)[i] for i in good] == [expected[i] for i in good]
        assert key_parts(llm.generate(prompts, greedy(6), use_tqdm=False)) == expected


def break_step(llm: LLM, number: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = core_of(llm).executor
    execute, count = executor.execute_model, 0

    class Broken:
        output = ModelRunnerOutput()

        def result(self) -> Any:
            raise RuntimeError("broken")

    def watched(scheduled: Any) -> Any:
        nonlocal count
        count += 1
        if count != number:
            return execute(scheduled)
        if where == "start":
            raise RuntimeError("broken")
        execute(scheduled)
        return Broken()

    monkeypatch.setattr(executor, "execute_model", watched)


def test_an_abort_while_a_step_is_under_way(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen3_5"), async_scheduling=True) as llm:
        ids = [
            llm.llm_engine.add_request(str(i), prompt, greedy(50))
            for i, prompt in enumerate(random_prompts(24, [30, 31]))
        ]
        for _ in range(4):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(ids[:1])
        ended = []
        while llm.llm_engine.has_unfinished_requests():
            ended += [output for output in llm.llm_engine.step() if output.finished]
        assert [len(output.outputs[0].token_ids) for output in ended] == [50]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_fails_loses_no_news_of_files(
    asynchronous: bool, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that reports a file as complete fails: the reply that waits for it goes out."""
    short, long = random_prompts(25, [20, 30])
    options: dict[str, Any] = {"async_scheduling": asynchronous}
    with engine(checkpoint("llama"), **options, **extraction_config([1, 3], tmp_path)) as llm:
        executor = core_of(llm).executor
        execute = executor.execute_model
        broken: list[set[str]] = []

        def watched(scheduled: Any) -> Any:
            pending = execute(scheduled)
            finish = pending.result

            def result() -> Any:
                output = finish()
                if output.kv_connector_output.finished_sending and not broken:
                    broken.append(output.kv_connector_output.finished_sending)
                    raise RuntimeError("broken")
                return output

            return SimpleNamespace(result=result, output=pending.output)

        monkeypatch.setattr(executor, "execute_model", watched)
        llm.llm_engine.add_request("short", short, greedy(1))
        llm.llm_engine.add_request("long", long, greedy(300))
        ended: dict[str, RequestOutput] = {}
        for _ in range(800):
            ended |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
            if len(ended) == 2:
                break
    assert len(broken) == 1
    assert len(rows_of(ended["short"])) == 20
    assert ended["long"].outputs[0].finish_reason in ("error", "length")


def test_bad_rows_end_their_request_alone(checkpoint: Checkpoint) -> None:
    """The next step, which had begun with rows of the same request, belongs to others, too."""
    huge = SteeringVector(torch.full((72,), 1e6), 1, positions=[0])
    prompts = [p["prompt_token_ids"] for p in random_prompts(24, [40, 25, 60, 7, 33] * 6)]
    params = [greedy(4) if number % 2 else None for number in range(len(prompts))]
    options = {"layers": [2, 3], "dtype": "float16", "on_error": "yield"}
    found = []
    for async_scheduling in (False, True):
        arguments = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 16}
        with engine(checkpoint("llama"), **arguments) as llm:
            requests = [
                ExtractRequest(ids, sampling_params=own, steering=[huge] if number % 3 else None)
                for number, (ids, own) in enumerate(zip(prompts, params, strict=True))
            ]
            found.append(list(llm.extract(requests, **options)))
    for one, other in zip(*found, strict=True):
        assert one.index == other.index
        if one.index % 3:
            assert "token 0, layer 2 are not finite" in one.reason == other.reason
        else:
            assert torch.equal(one.hidden_states, other.hidden_states)


def test_the_smallest_pool_ends_a_request_whose_states_are_kept(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """States that a step under way keeps are free only at its end: the request has to wait."""
    options = {"block_size": 48, "max_model_len": 199, "max_num_batched_tokens": 1}
    options |= {"async_scheduling": True, **extraction_config([2, 3], tmp_path)}
    with (
        pytest.raises(ValueError, match="num_gpu_blocks_override=2") as error,
        engine(checkpoint("bamba"), num_gpu_blocks_override=2, **options),
    ):
        pass
    fewest = int(str(error.value).split("needs ")[1].split()[0])
    with engine(checkpoint("bamba"), num_gpu_blocks_override=fewest, **options) as llm:
        core, (prompt,) = core_of(llm), random_prompts(5, [190])
        execute, steps = core.executor.execute_model, itertools.count()

        def counted(planned: Any) -> Any:
            assert next(steps) < 400, "the request starts again and again"
            return execute(planned)

        core.executor.execute_model = counted
        (output,) = llm.generate([prompt], greedy(4), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(rows_of(output)) == 190
        assert core.scheduler._totals.num_preemptions == 0
