"""The speed that this engine owes, row by row: what was asked for and what this machine gives.

Every ratio is measured in one run, the contenders in turn, each in a process of its own, and is
the median of the rounds' own ratios. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm import TokensPrompt
from vllm.bench.contenders import (
    BoundContender,
    Contender,
    EngineContender,
    PlainContender,
    Prompts,
    Round,
    TransformersContender,
    Workload,
    find_memory_folder,
)
from vllm.bench.extraction import describe_machine, measurement_json
from vllm.bench.linear_weights import load_linear_weights
from vllm.bench.models import find_model
from vllm.bench.rounds import Entry, run_in_turn
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

CACHE = Path(__file__).resolve().parent.parent / ".cache"
LEAST_STORAGE_BYTES = 4 * 2**30
TOUCHED_POOL_BYTES = 512 * 2**20
"""A pool that two rounds of long prompts fill: later ones touch no memory for the first time."""
QUEUED_REQUESTS = 10_000
QUEUED_PROMPT_LEN = 32
QUEUE_POOLS = {"dense": 0, "hybrid": 18}
"""Pool -> recurrent layers."""
MAX_NUM_BATCHED_TOKENS = 2048
NUM_BLOCKS = 4096
SNAPSHOT_INTERVAL_TOKENS = 64
COPY_BYTES = 256 * 2**20
COPIES = 99
"""One or two seconds: the speed of a shared machine's memory changes from second to second."""


class DecodeContender(PlainContender):
    """Decoding alone: the time of the steps after the one that computes the prompts."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        assert workload.num_prompts * workload.prompt_len <= workload.max_num_batched_tokens
        self.note = f"{workload.num_decode_steps} steps of {workload.num_prompts} tokens"

    def run(self, prompts: Prompts) -> Round:
        engine = self.llm.llm_engine
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), self._sampling)
        engine.step()
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return Round(time.perf_counter() - start)


class WeightReadContender(Contender):
    """Time to read all weights once per decoding step, at copy bandwidth.

    The weights are those of the layers' products and of the LM head. Copy bandwidth is
    measured in every round, in this process, on all of torch's threads: 256 MiB are copied
    from one buffer to another 99 times. It is the bytes read plus the bytes written, divided
    by the median time of a copy. Reads that a cache makes in order to write are not counted.
    """

    def __init__(self, workload: Workload) -> None:
        weights = load_linear_weights(workload.checkpoint)
        self._weight_bytes = weights.num_elements * weights.head.dtype.itemsize
        self._num_steps = workload.num_decode_steps
        self._source = torch.ones(COPY_BYTES // 8, dtype=torch.int64)
        self._target = torch.zeros_like(self._source)
        self.note = f"{self._weight_bytes / 1e6:,.0f} MB of weights"

    def run(self, prompts: Prompts) -> Round:
        times = []
        for _ in range(COPIES):
            start = time.perf_counter()
            self._target.copy_(self._source)
            times.append(time.perf_counter() - start)
        bytes_per_second = 2 * COPY_BYTES / statistics.median(times)
        return Round(self._num_steps * self._weight_bytes / bytes_per_second)


@dataclass(frozen=True)
class Rival:
    """A contender to compare the engine with, and how much faster the engine has to be."""

    name: str
    contender: type[Contender]
    at_least: float
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the workload that differ for it."""


@dataclass(frozen=True)
class Target:
    """One measurement of a model; it gives a row for each rival."""

    work: str
    model: str
    num_prompts: int
    prompt_len: int
    rivals: tuple[Rival, ...]
    contender: type[Contender] = EngineContender
    changes: dict[str, Any] = field(default_factory=dict)


HYBRID, DENSE = "qwen3.5-0.5b", "llama-1b"
TARGETS = {
    "hybrid": Target(
        "hybrid 0.5B, 16 x 512, four layers",
        *(HYBRID, 16, 512),
        (Rival("bound", BoundContender, 0.85), Rival("transformers", TransformersContender, 2.0)),
    ),
    "dense": Target(
        "dense 1B, 16 x 512, four layers", DENSE, 16, 512, (Rival("bound", BoundContender, 0.90),)
    ),
    "long": Target(
        "hybrid, 2 x 8192",
        *(HYBRID, 2, 8192),
        (Rival("bound", BoundContender, 0.75),),
        changes={"engine_options": {"kv_cache_memory_bytes": TOUCHED_POOL_BYTES}},
    ),
    "short": Target(
        "hybrid, 512 x 16",
        *(HYBRID, 512, 16),
        (
            Rival("bound", BoundContender, 0.75),
            Rival("one by one", TransformersContender, 5.0, {"peer_batch_sizes": (1,)}),
        ),
    ),
    "plain": Target(
        "extraction against plain prefill",
        *(HYBRID, 16, 512),
        (Rival("plain prefill", PlainContender, 0.98),),
    ),
    "half-depth": Target(
        "layer 12 of 24 only, no output token",
        *(HYBRID, 16, 512),
        (Rival("full depth", EngineContender, 1.8, {"layer_ids": (24,)}),),
        changes={"layer_ids": (12,), "output_len": 0},
    ),
    "decode-1": Target(
        "decode, batch 1, 128 tokens",
        *(HYBRID, 1, 16),
        (Rival("reading the weights", WeightReadContender, 0.7),),
        contender=DecodeContender,
        changes={"output_len": 129},
    ),
    "decode-16": Target(
        "decode, batch 16, 128 tokens",
        *(HYBRID, 16, 16),
        (Rival("reading the weights", WeightReadContender, 0.7),),
        contender=DecodeContender,
        changes={"output_len": 129},
    ),
}
"""Ratios: speed of this engine over the rival's."""


@dataclass(frozen=True)
class Row:
    """A target and what was measured."""

    name: str
    work: str
    against: str
    target: str
    measured: float
    is_met: bool
    rounds: int
    details: dict[str, Any]


def measure_target(name: str, target: Target, rounds: int, overrides: dict[str, Any]) -> list[Row]:
    """All rivals of one target in one run."""
    model = find_model(target.model, CACHE)
    base = Workload(
        checkpoint=model.checkpoint,
        vocabulary=model.vocabulary,
        layer_ids=model.default_layer_ids,
        num_prompts=target.num_prompts,
        prompt_len=target.prompt_len,
    )
    workload = replace(base, **{**target.changes, **overrides})
    entries = [
        Entry("this engine", target.contender, workload),
        *(Entry(r.name, r.contender, replace(workload, **r.changes)) for r in target.rivals),
    ]
    results = run_in_turn(entries, rounds)
    details = {key: measurement_json(result) for key, result in results.items()}
    rows = []
    for rival in target.rivals:
        ratio = results["this engine"].speed_over(results[rival.name])
        is_met = ratio >= rival.at_least
        asked = f">= {rival.at_least:g}"
        rows.append(Row(name, target.work, rival.name, asked, ratio, is_met, rounds, details))
    return rows


class SchedulerSpeed(NamedTuple):
    """Results of one run over a queue; they leave out the time of adding requests."""

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


def measure_queue(pool: str, num_recurrent_layers: int, rounds: int) -> list[Row]:
    """The pool and the scheduler alone, in a process set up as the engine core's is."""
    settle_garbage_collector()
    speeds = [
        measure_scheduler(
            QUEUED_REQUESTS, QUEUED_PROMPT_LEN, num_recurrent_layers=num_recurrent_layers, seed=n
        )
        for n in range(rounds)
    ]
    rate = statistics.median(speed.requests_per_second for speed in speeds)
    growth = statistics.median(s.first_step_seconds / s.last_step_seconds for s in speeds)
    details = {"rounds": [speed._asdict() for speed in speeds]}
    work = f"scheduler alone, {pool}, {QUEUED_REQUESTS:,} queued"
    is_flat = growth <= 1.2  # steps with the longest queue against the shortest; a fifth is noise
    return [
        Row("scheduler", work, "requests/s", "> 20000", rate, rate > 20_000, rounds, details),
        Row("scheduler", work, "step, first/last 10th", "<= 1.2", growth, is_flat, rounds, details),
    ]


def measure(names: Sequence[str], rounds: int, overrides: dict[str, Any]) -> Iterator[Row]:
    """The rows of these targets, one after another."""
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        if name == "scheduler":
            for pool, num_recurrent_layers in QUEUE_POOLS.items():
                yield from measure_queue(pool, num_recurrent_layers, rounds)
        else:
            yield from measure_target(name, TARGETS[name], rounds, overrides)


def results(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Return what ``--json`` writes; benchmarks/report.py reads it from benchmarks/results."""
    return {
        "machine": describe_machine(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "command": command,
        "conditions": "",
        "rows": [asdict(row) for row in rows],
    }


def _commit() -> str | None:
    """The checked-out commit, with "+" where files differ from it; None outside of a checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=CACHE.parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*TARGETS, "scheduler"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
        help=", ".join(names))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="where hidden states go (default: memory)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: use at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = []
    print(f"{'':42}{'against':24}{'target':>10}{'measured':>12}")
    storage = options.storage or find_memory_folder(LEAST_STORAGE_BYTES)
    for row in measure(options.only, options.rounds, {"storage_root": storage}):
        rows.append(row)
        verdict = "met" if row.is_met else "MISSED"
        measured = f"{row.measured:,.3f}" if row.measured < 1000 else f"{row.measured:,.0f}"
        line = f"{row.work:42}{row.against:24}{row.target:>10}{measured:>12}  {verdict}"
        print(line, flush=True)
    if options.json is not None:
        words = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "benchmarks/targets.py", *words])
        options.json.write_text(json.dumps(results(rows, command), indent=2) + "\n")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
