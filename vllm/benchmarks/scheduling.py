"""The pool and the scheduler by themselves: the model is a stub that answers at once."""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

import torch

from vllm.config import CacheConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
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

MAX_NUM_BATCHED_TOKENS = 2048
NUM_BLOCKS = 4096
SNAPSHOT_INTERVAL_TOKENS = 64


class SchedulerSpeed(NamedTuple):
    """What one run over a queue gave; the time of adding requests is not in it."""

    requests_per_second: float
    """Scheduled, answered and freed."""
    first_step_seconds: float
    """Median over the first tenth of the steps: nearly all requests still wait."""
    last_step_seconds: float
    """Median over the last tenth of the steps."""


def measure_scheduler(
    num_requests: int, prompt_len: int, *, num_recurrent_layers: int, seed: int = 0
) -> SchedulerSpeed:
    """Queue all requests at once, then step until none is left; each wants one token.

    The pool is the one of a 0.5B model: 6 attention layers, as many recurrent ones as asked
    for (a request holds a block for each), rows of 4 layers. Prefix caching is on, a step has
    2,048 tokens. Prompts are random: no prefix is found.
    """
    scheduler = _make_scheduler(num_recurrent_layers)
    generator = random.Random(seed)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):
        message = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=[generator.randrange(32_768) for _ in range(prompt_len)],
            sampling_params=params,
            arrival_time=float(index),
        )
        scheduler.add_request(Request(message))
    steps = []
    while scheduler.num_unfinished_requests():
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        answer = ModelRunnerOutput(
            {request_id: [1] for request_id in scheduled.num_scheduled_tokens}
        )
        scheduler.update_from_output(scheduled, answer)
        steps.append(time.perf_counter() - start)
    tenth = max(len(steps) // 10, 1)
    return SchedulerSpeed(
        num_requests / sum(steps),
        statistics.median(steps[:tenth]),
        statistics.median(steps[-tenth:]),
    )


def _make_scheduler(num_recurrent_layers: int) -> Scheduler:
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
    layout = plan_layout(specs, CacheConfig())
    plan = layout.with_blocks(NUM_BLOCKS)
    manager = KVCacheManager(
        plan,
        enable_caching=True,
        snapshot_interval=SNAPSHOT_INTERVAL_TOKENS,
        max_retained_hidden_blocks=64,
        max_retained_snapshots=64,
    )
    config = SchedulerConfig(max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, max_num_seqs=256)
    return Scheduler(config, plan, manager, max_model_len=8192)
