"""Memory of ranks, and the time until all of them have the plan of a step.

python -m tests.engine.rank_costs memory        # a checkpoint of 200 MiB on 1, 2 and 4 ranks
python -m tests.engine.rank_costs plans [--ranks 8]
python -m tests.engine.rank_costs calls [--ranks 8]     # their way alone; no rank computes
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.engine import rank_functions
from tests.engine.harness import core_of, greedy, random_prompts
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.distributed.broadcast import BroadcastPlace, BroadcastReceiver, BroadcastSender
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

MIB = 2**20
POOL_BYTES = 64 * MIB
PLAN_BYTES = 1500
"""About those of a decode step of four requests."""
PAUSE_SECONDS = 0.004
"""Between two messages: about the time of a step."""
LARGE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Pairs of tensor_parallel_size and pipeline_parallel_size."""


class RankMemory(NamedTuple):
    """Bytes of a rank's process that no other process has."""

    rank: int
    weights: int
    """Parameters that it holds."""
    grown: int
    """Memory beyond that of a rank of a tiny model, without the pool."""
    pool: int
    """Memory that the pool takes once all of it was written, also places of other stages."""


async def memory_of(checkpoint: Path, tensor: int, stages: int) -> list[list[int]]:
    """Return for each rank its number, its parameters' bytes, and its own memory before and after
    the pool was written."""
    args = AsyncEngineArgs(
        str(checkpoint),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        max_model_len=128,
        kv_cache_memory_bytes=POOL_BYTES,
    )
    llm = AsyncLLM.from_engine_args(args)
    try:
        await llm.start()
        prompts = random_prompts(3, [100, 17])
        _ = [one async for one in llm.extract(prompts, layers=[0, 1])]
        calls = [rank_functions.rank, rank_functions.parameter_bytes, rank_functions.own_bytes]
        found = [await llm.collective_rpc(call) for call in calls]
        await llm.collective_rpc(rank_functions.poison)
        found.append(await llm.collective_rpc(rank_functions.own_bytes))
        return sorted(map(list, zip(*found, strict=True)))
    finally:
        await llm.shutdown()


def measure_memory(folder: Path, tensor: int, stages: int) -> list[RankMemory]:
    """Measure each rank of an engine with a checkpoint of 200 MiB against one with a tiny one."""
    large, tiny = folder / "large", folder / "tiny"
    if not large.exists():
        make_checkpoint(large, "llama", dtype=torch.bfloat16, **LARGE)
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
        make_checkpoint(tiny, "llama", dtype=torch.bfloat16, **sizes)
    base = asyncio.run(memory_of(tiny, tensor, stages))
    found = asyncio.run(memory_of(large, tensor, stages))
    return [
        RankMemory(rank, weights, before - tiny_before, after - before)
        for (rank, weights, before, after), (_, _, tiny_before, _) in zip(found, base, strict=True)
    ]


class PlanTimes(NamedTuple):
    """Times that a step's plan takes, in seconds."""

    sending: float
    """CPU time of the engine's process until the plan is in the sockets of all other ranks."""
    there: float
    """Time from the beginning of that until the last rank begins with the step."""


@contextmanager
def times_of_calls() -> Iterator[list[tuple[float, float]]]:
    """Note when sending of steps to the other ranks begins, and the CPU time that it takes."""
    times = []
    send = MultiprocExecutor._call

    def noted(executor: MultiprocExecutor, method: str, *args: Any) -> int:
        begin, cpu = time.monotonic(), time.thread_time()
        number = send(executor, method, *args)
        if method == "execute_model" and args[0].total_num_scheduled_tokens:
            times.append((begin, time.thread_time() - cpu))
        return number

    MultiprocExecutor._call = noted  # type: ignore[method-assign]
    try:
        yield times
    finally:
        MultiprocExecutor._call = send  # type: ignore[method-assign]


def measure_plans(folder: Path, ranks: int, steps: int) -> list[PlanTimes]:
    """Measure the way of the plans of decode steps, with four requests each."""
    sizes = {"num_attention_heads": ranks, "num_key_value_heads": ranks, "head_dim": 16}
    checkpoint = make_checkpoint(folder / "plans", "llama", **sizes)
    options: dict[str, Any] = {"max_model_len": steps + 64, "kv_cache_memory_bytes": 4 * MIB}
    with LLM(str(checkpoint), tensor_parallel_size=ranks, **options) as llm:
        llm.generate(random_prompts(5, [9]), greedy(3), use_tqdm=False)
        llm.collective_rpc(rank_functions.note_steps)
        with times_of_calls() as calls:
            llm.generate(random_prompts(5, [9, 3, 20, 5]), greedy(steps), use_tqdm=False)
        core_of(llm).executor.run_waiting_steps()
        begun = llm.collective_rpc(rank_functions.noted_steps)
    steps_begun = list(zip(*begun, strict=True))
    return [
        PlanTimes(cpu, max(each) - begin)
        for (begin, cpu), each in zip(calls, steps_begun, strict=True)
    ]


def _note_arrivals(place: BroadcastPlace, arrivals: Any) -> None:
    receiver = BroadcastReceiver(place)
    arrivals[place.reader] = time.monotonic()
    while receiver.receive():
        arrivals[place.reader] = time.monotonic()


def measure_calls(ranks: int, steps: int) -> list[PlanTimes]:
    """Measure the way of messages as long as a plan to processes that do nothing but wait."""
    context = multiprocessing.get_context("fork")  # processes with the memory's descriptor
    sender, arrivals = BroadcastSender(ranks - 1), context.Array("d", ranks - 1, lock=False)
    processes = [
        context.Process(target=_note_arrivals, args=(place, arrivals), daemon=True)
        for place in sender.places
    ]
    for process in processes:
        process.start()
    while not all(arrivals):
        time.sleep(PAUSE_SECONDS)
    times = []
    for _ in range(steps):
        time.sleep(PAUSE_SECONDS)
        begin, cpu = time.monotonic(), time.thread_time()
        sender.send(b"x" * PLAN_BYTES, _wait_for_reader)
        cpu = time.thread_time() - cpu
        while min(arrivals) < begin:
            time.sleep(PAUSE_SECONDS)
        times.append(PlanTimes(cpu, max(arrivals) - begin))
    sender.send(b"", _wait_for_reader)
    for process in processes:
        process.join()
    return times


def _wait_for_reader(reader: int) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["memory", "plans", "calls"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "memory":
            for tensor, stages in SIZES:
                for rank, weights, grown, pool in measure_memory(Path(folder), tensor, stages):
                    sizes = f"weights {weights / MIB:.1f}, memory {grown / MIB:.1f} + pool "
                    sizes += f"{pool / MIB:.1f}"
                    print(f"TP {tensor} PP {stages} rank {rank}: MiB of {sizes}", flush=True)
            return
        load = os.getloadavg()[0]
        if arguments.what == "calls":
            found = measure_calls(arguments.ranks, arguments.steps)
        else:
            found = measure_plans(Path(folder), arguments.ranks, arguments.steps)
        sent, there = (sorted(1e6 * times[part] for times in found) for part in range(2))
        low, high = (there[len(there) * part // 100] for part in (10, 90))
        print(
            f"{arguments.ranks} ranks on {os.cpu_count()} cores, load {load:.1f} before: sending a "
            f"plan takes {statistics.median(sent):.0f} us of CPU time, the last rank has it after "
            f"{statistics.median(there):.0f} us (medians of {len(there)} steps; 10th and 90th "
            f"percentile {low:.0f}, {high:.0f})"
        )


if __name__ == "__main__":
    main()
