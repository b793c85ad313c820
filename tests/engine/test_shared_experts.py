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
from safetensors.torch import load_file

from tests.engine import rank_functions
from tests.engine.harness import engine, extraction_config, greedy
from tests.engine.test_data_parallel import OPTIONS, PROMPTS, tokens
from tests.grids import at_night
from tests.models.adapters import write_adapter
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.exceptions import FailureError, FailureKind
from vllm.hidden_states import ExtractRequest, FailedSample
from vllm.lora.request import LoRARequest
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
    busiest = []
    while not busiest or busiest[-1] >= 0.1:  # once what a start leaves to do is done
        assert len(busiest) < 40, busiest
        before = [sum(one.cpu_times()[:2]) for one in processes]
        time.sleep(0.5)
        after = [sum(one.cpu_times()[:2]) for one in processes]
        busiest.append(max(b - a for a, b in zip(before, after, strict=True)))


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


TWO_EACH: dict[str, Any] = {"tensor_parallel_size": 2, "expert_trace": True}


@pytest.mark.exhaustive
def test_engines_of_two_ranks(folder: Path, expected: Expected) -> None:
    with engine(folder, **OPTIONS, **TWO_EACH, enable_expert_parallel=True) as llm:
        whole = list(llm.extract(REQUESTS))
    for ours, one in zip(whole, expected.samples, strict=True):
        assert relative_error(ours.hidden_states, one.hidden_states) < 1e-4
    with shared(folder, **TWO_EACH, max_num_batched_tokens=24) as engines:
        assert engines.rpc(rank_functions.own_experts) == [1, 2, 2, 2]
        check_rows(engines.extract(REQUESTS), whole)
        assert engines.tokens(range(len(PROMPTS))) == expected.tokens
        for rank in (0, 1):
            for number in (0, 1):
                engines.rpc(rank_functions.fail_on_engine, number, rank)
                found = engines.extract(REQUESTS, on_error="yield")
                failed = [one for one in found if isinstance(one, FailedSample)]
                assert 0 < len(failed) < len(REQUESTS)
                check_rows(engines.extract(REQUESTS), whole)
        for _ in range(20):
            assert engines.tokens([5]) == [expected.tokens[5]]


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_ends_all(folder: Path) -> None:
    with shared(folder, **TWO_EACH) as engines:
        (second,) = psutil.Process(engines.pids[0]).children()

        async def run() -> None:
            under_way = [asyncio.create_task(tokens(engines.llm, n)) for n in range(len(PROMPTS))]
            await asyncio.sleep(0.05)
            second.kill()
            results = await asyncio.gather(*under_way, return_exceptions=True)
            kinds = {type(one) for one in results}
            assert kinds <= {list, EngineDeadError, FailureError}, results
            for one in results:
                if isinstance(one, FailureError):
                    assert one.failure.kind is FailureKind.ENGINE_DEAD
            assert kinds != {list}
            for _ in range(100):
                if engines.llm.errored:
                    break
                await asyncio.sleep(0.1)
            with pytest.raises(EngineDeadError):
                await tokens(engines.llm, 0)

        engines.runner.run(run())


@pytest.mark.exhaustive
def test_an_engine_that_stops_ends_all(folder: Path) -> None:
    with shared(folder, distributed_timeout_seconds=3) as engines:
        assert engines.tokens([0])
        os.kill(engines.pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(Exception, match=r"not come for 3 s|had some of the experts"):
                engines.tokens([0])
        finally:
            os.kill(engines.pids[1], signal.SIGCONT)
        with pytest.raises(EngineDeadError):
            engines.tokens([0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_thousands_of_steps_without_a_token(ranks: int, folder: Path) -> None:
    """The second engine never has a request."""
    count = 10_000 if ranks == 1 else 300
    with shared(folder, tensor_parallel_size=ranks) as engines:

        async def run() -> int:
            total = 0
            while total < count:
                found = await tokens(engines.llm, 7)
                total += len(found)
            return total

        assert engines.runner.run(run()) >= count
        used = engines.rpc(rank_functions.has_computed)
        assert used == [True] * ranks + [False] * ranks


@pytest.mark.exhaustive
def test_preemption_in_one_engine(folder: Path) -> None:
    """The requests of the second engine end before its pool is full."""
    lengths = [40, 2] * 4
    with engine(folder, **OPTIONS) as llm:
        params = [greedy(length) for length in lengths]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    blocks = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 40}
    with shared(folder, **blocks) as engines:

        async def run() -> list[list[int]]:
            return await asyncio.gather(
                *(tokens(engines.llm, n, length) for n, length in enumerate(lengths))
            )

        for _ in range(3):
            found = engines.runner.run(run())
            assert found == [list(output.outputs[0].token_ids) for output in outputs]
        assert engines.llm.stats.num_preemptions > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama4", {}),  # weights multiply the inputs of experts
        ("nemotron_h", {}),  # experts compute in another space
        ("longcat_flash", {}),  # experts that return their input
        ("gpt_oss", {}),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
        ("gemma4_moe", {}),
        ("mixtral", {"quantization": "int8"}),
        ("qwen3_5_moe_vl", {}),
        ("qwen3_5_moe", {"tensor_parallel_size": 2, "enable_sequence_parallel": True}),
    ],
)
def test_families(family: str, options: dict[str, Any], checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    alone = {**OPTIONS, **options, "kv_cache_memory_bytes": 2**25}
    if "tensor_parallel_size" in options:
        alone["enable_expert_parallel"] = True
    with engine(folder, **alone) as llm:
        num_layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        layers: list[list[int | str]] = [list(range(num_layers + 1)), [1], [num_layers - 1]]
        requests = [
            ExtractRequest(prompt, layers=layers[number % 3])
            for number, prompt in enumerate(PROMPTS)
        ]
        whole = list(llm.extract(requests))
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    with shared(folder, **alone, max_num_batched_tokens=64) as engines:
        found = engines.extract(requests)
        for ours, one in zip(found, whole, strict=True):
            assert torch.equal(ours.hidden_states, one.hidden_states)
        lists = [list(output.outputs[0].token_ids) for output in outputs]
        assert engines.tokens(range(len(PROMPTS))) == lists


@pytest.mark.exhaustive
def test_adapters(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "whole", folder, 1, rank=3, with_experts=True)
    write_adapter(tmp_path / "rest", folder, 2, rank=3, with_experts=False)
    whole = LoRARequest("whole", 1, str(tmp_path / "whole"))
    rest = LoRARequest("rest", 2, str(tmp_path / "rest"))
    asked = [ExtractRequest(prompt, layers=[4], lora_request=rest) for prompt in PROMPTS]
    options: dict[str, Any] = {**OPTIONS, "enable_lora": True}
    with engine(folder, **options) as llm:
        alone = list(llm.extract(asked))
    with shared(folder, **options) as engines:
        for ours, one in zip(engines.extract(asked), alone, strict=True):
            assert torch.equal(ours.hidden_states, one.hidden_states)
        refused = [ExtractRequest(PROMPTS[0], layers=[4], lora_request=whole)]
        with pytest.raises(ValueError, match=r"changes experts, which .* data_parallel_size=2"):
            engines.extract(refused)
        with pytest.raises(ValueError, match=r"changes experts, which .* data_parallel_size=2"):
            engines.runner.run(engines.llm.add_lora(whole))
        assert len(engines.extract(asked)) == len(asked)


@pytest.mark.exhaustive
def test_files_of_rows_while_steps_overlap(folder: Path, tmp_path: Path) -> None:
    with engine(folder, **OPTIONS) as llm:
        alone = list(llm.extract(PROMPTS, layers=[0, 3]))
    files = extraction_config([0, 3], tmp_path)
    with shared(folder, async_scheduling=True, max_num_batched_tokens=24, **files) as engines:

        async def run(number: int) -> torch.Tensor:
            found = engines.llm.generate(PROMPTS[number], greedy(1), f"file {number}")
            output = [one async for one in found][-1]
            path = Path(output.kv_transfer_params["hidden_states_path"])
            return load_file(path)["hidden_states"]

        async def run_all() -> list[torch.Tensor]:
            return await asyncio.gather(*(run(number) for number in range(len(PROMPTS))))

        for ours, one in zip(engines.runner.run(run_all()), alone, strict=True):
            assert torch.equal(ours, one.hidden_states)
        assert len(list(tmp_path.glob("*.safetensors"))) == len(PROMPTS)


@pytest.mark.exhaustive
def test_a_dense_model_runs_as_without(checkpoint: Checkpoint) -> None:
    """An engine that ends takes only its own requests."""
    with shared(checkpoint("llama")) as engines:
        assert not engines.llm.started.shares_experts
        found = engines.tokens(range(len(PROMPTS)))
        os.kill(engines.pids[0], signal.SIGKILL)
        time.sleep(0.5)
        engines.runner.run(asyncio.sleep(0.1))
        assert engines.tokens(range(len(PROMPTS))) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: stages of several engines"),
        ({"all2all_backend": "pplx"}, "all2all_backend='pplx'"),
        at_night({"num_experts": 1}, r"1 experts .*data_parallel_size=2 times tensor_parallel_"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, checkpoint: Checkpoint) -> None:
    sizes, options = dict(SIZES), dict(options)
    if "num_experts" in options:
        sizes |= {"num_experts": options.pop("num_experts"), "num_experts_per_tok": 1}
    folder = checkpoint("qwen3_moe", **sizes)
    with pytest.raises(ValueError, match=message), shared(folder, **options):
        pass
