"""The pool and the scheduler alone: a queue that a model answers at once, and one large step."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.row import Row
from vllm.config import CacheConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

QUEUES = (1_000, 10_000, 100_000)
"""Numbers of requests that wait at the start; the middle one is compared with the target."""
QUEUED_PROMPT_LEN = 32
POOLS = {"dense": (0, 30_000), "hybrid": (18, 22_000)}
"""Pool -> recurrent layers, requests/s."""
LEAST_SHARE_OF_FASTEST = 0.8
"""Speed with the slowest queue, over that with the fastest."""
MAX_NUM_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 256
NUM_BLOCKS = 4096
SNAPSHOT_INTERVAL_TOKENS = 64
NUM_RUNNING = 1_000
RUNNING_BLOCKS = 60_000
PLANNED_STEPS = 64
MOST_PLANNING_MS = 2.0


class SchedulerSpeed(NamedTuple):
    """Results of one run over a queue; they leave out the time of adding requests."""

    requests_per_second: float
    """Scheduled, answered and freed."""
    first_step_seconds: float
    """Median over the first tenth of the steps: nearly all requests still wait."""
    last_step_seconds: float
    """Median over the last tenth of the steps."""


def measure_scheduler(rounds: int) -> Iterator[Row]:
    """The rows of both pools, in a process set up as the engine core's is."""
    settle_garbage_collector()
    for pool, (num_recurrent_layers, least_rate) in POOLS.items():
        speeds = {
            size: [run_queue(size, num_recurrent_layers, seed) for seed in range(rounds)]
            for size in QUEUES
        }
        rates = {
            size: statistics.median(speed.requests_per_second for speed in runs)
            for size, runs in speeds.items()
        }
        details = {f"{size} queued": [s._asdict() for s in runs] for size, runs in speeds.items()}
        middle = QUEUES[len(QUEUES) // 2]
        work = f"scheduler alone, {pool}"
        queued = f"{work}, {middle:,} queued"
        yield Row(
            "scheduler", queued, "requests/s", f">= {least_rate}", rates[middle], rounds, details
        )
        flatness = min(rates.values()) / max(rates.values())
        sizes = f"{work}, {QUEUES[0]:,} to {QUEUES[-1]:,} queued"
        yield Row(
            "scheduler", sizes, "the fastest", f">= {LEAST_SHARE_OF_FASTEST}", flatness, rounds
        )


def measure_planning(rounds: int) -> Iterator[Row]:
    """Planning a step in which many requests decode, in milliseconds."""
    settle_garbage_collector()
    for pool, (num_recurrent_layers, _) in POOLS.items():
        times = [plan_steps(num_recurrent_layers) for _ in range(rounds)]
        work = f"planning a step of {NUM_RUNNING:,} requests, {pool}"
        target = f"<= {MOST_PLANNING_MS:g}"
        details = {"milliseconds": times}
        yield Row("planning", work, "ms", target, statistics.median(times), rounds, details)


def run_queue(num_requests: int, num_recurrent_layers: int, seed: int = 0) -> SchedulerSpeed:
    """Queue all requests at once, then step until none is left; each wants one token.

    The pool is the one of a 0.5B model: 6 attention layers, as many recurrent ones as asked
    for (a request holds a block for each), rows of 4 layers. Prefix caching is on, a step has
    2,048 tokens. Prompts are random: no prefix is found.
    """
    scheduler = _make_scheduler(num_recurrent_layers, NUM_BLOCKS, MAX_NUM_SEQS)
    _add_requests(scheduler, num_requests, QUEUED_PROMPT_LEN, max_tokens=1, seed=seed)
    steps = []
    while scheduler.num_unfinished_requests():
        planning, taking, _ = _step(scheduler)
        steps.append(planning + taking)
    tenth = max(len(steps) // 10, 1)
    return SchedulerSpeed(
        num_requests / sum(steps),
        statistics.median(steps[:tenth]),
        statistics.median(steps[-tenth:]),
    )


def plan_steps(num_recurrent_layers: int) -> float:
    """Return the median milliseconds of ``schedule`` once all requests decode."""
    scheduler = _make_scheduler(num_recurrent_layers, RUNNING_BLOCKS, NUM_RUNNING)
    _add_requests(scheduler, NUM_RUNNING, 20, max_tokens=400, seed=0)
    while _step(scheduler)[2] < NUM_RUNNING:
        pass
    gc.collect()
    return 1000 * statistics.median(_step(scheduler)[0] for _ in range(PLANNED_STEPS))


def _step(scheduler: Scheduler) -> tuple[float, float, int]:
    """Plan and answer a step; returns the seconds of planning, those of taking the answer, which
    is there at once, and the requests in it."""
    start = time.perf_counter()
    scheduled = scheduler.schedule()
    planning = time.perf_counter() - start
    answer = ModelRunnerOutput(
        {
            request_id: [1]
            for request_id in scheduled.num_scheduled_tokens
            if _is_prompt_computed(scheduler.requests[request_id])
        }
    )
    start = time.perf_counter()
    scheduler.update_from_output(scheduled, answer)
    return planning, time.perf_counter() - start, len(scheduled.num_scheduled_tokens)


def _is_prompt_computed(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_prompt_tokens


def _add_requests(
    scheduler: Scheduler, count: int, prompt_len: int, *, max_tokens: int, seed: int
) -> None:
    generator = random.Random(seed)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for index in range(count):
        message = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=[generator.randrange(32_768) for _ in range(prompt_len)],
            sampling_params=params,
            arrival_time=float(index),
        )
        scheduler.add_request(Request(message))


def _make_scheduler(num_recurrent_layers: int, num_blocks: int, max_num_seqs: int) -> Scheduler:
    attention = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=256, dtype=torch.bfloat16
    )
    state = MambaSpec(
        block_size=SNAPSHOT_INTERVAL_TOKENS,
        shapes=((3, 6144), (16, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
    )
    rows = HiddenStateCacheSpec(
        block_size=16,
        num_kv_heads=4,
        head_size=1024,
        dtype=torch.bfloat16,
        max_resident_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    specs: dict[str, KVCacheSpec] = {"rows": rows}
    specs.update({f"attention.{i}": attention for i in range(6)})
    specs.update({f"recurrent.{i}": state for i in range(num_recurrent_layers)})
    plan = plan_layout(specs, CacheConfig()).with_blocks(num_blocks)
    manager = KVCacheManager(
        plan,
        enable_caching=True,
        snapshot_interval=SNAPSHOT_INTERVAL_TOKENS,
        max_retained_hidden_blocks=64,
        max_retained_snapshots=64,
    )
    config = SchedulerConfig(
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, max_num_seqs=max_num_seqs
    )
    return Scheduler(config, plan, manager, max_model_len=8192)
