"""Hidden states that a step hands to callers are bounded, and every request gets its own."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.test_scheduler import make_plan
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, ExtractionSpec, FinishReason
from vllm.v1.outputs import ExtractedRows, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.profile_run import most_rows

MAX_MODEL_LEN = 400


def make_scheduler(
    max_step_cells: int, *, alignment: int = 1, num_blocks: int = 400, chunked: bool = True
) -> Scheduler:
    plan = make_plan("dense", "none", num_blocks, CacheConfig())
    config = SchedulerConfig(
        max_num_batched_tokens=128 if chunked else MAX_MODEL_LEN,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=chunked,
    )
    manager = KVCacheManager(
        plan,
        enable_caching=False,
        snapshot_interval=32,
        max_retained_hidden_blocks=0,
        max_retained_snapshots=0,
    )
    return Scheduler(
        config,
        plan,
        manager,
        max_model_len=MAX_MODEL_LEN,
        chunk_alignment=alignment,
        max_step_cells=max_step_cells,
    )


def make_request(name: str, num_tokens: int, spec: ExtractionSpec | None) -> Request:
    return Request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1] * num_tokens,
            sampling_params=SamplingParams(max_tokens=0),
            arrival_time=0.0,
            extraction=spec,
        )
    )


class Run:
    """Steps, each of which is looked at."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, Request] = {}
        self.computed: Counter[str] = Counter()
        self.ended: dict[str, FinishReason | None] = {}
        self.step_cells: list[int] = []

    def add(self, name: str, num_tokens: int, spec: ExtractionSpec | None) -> None:
        self.requests[name] = make_request(name, num_tokens, spec)
        self.scheduler.add_request(self.requests[name])

    def step(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        for name in scheduled.preempted_req_ids:
            self.computed[name] = 0
        cells = 0
        output = ModelRunnerOutput()
        for name, count in scheduled.num_scheduled_tokens.items():
            start, request = self.computed[name], self.requests[name]
            end = self.computed[name] = start + count
            if end < request.num_prompt_tokens:
                assert end % self.scheduler.rules.alignment == 0
            spec = request.extraction
            if spec is None:
                continue
            wanted = range(MAX_MODEL_LEN) if spec.positions is None else spec.positions
            cells += sum(start <= p < end for p in wanted) * len(spec.layer_ids)
            if end == request.num_prompt_tokens:
                output.extracted_rows[name] = ExtractedRows({})
        self.step_cells.append(cells)
        for news in self.scheduler.update_from_output(scheduled, output).outputs:
            self.ended[news.request_id] = news.finish_reason
        self.scheduler.check_integrity()
        return scheduled

    def finish(self) -> None:
        while self.scheduler.num_unfinished_requests():
            assert self.step().total_num_scheduled_tokens > 0, "requests wait for ever"
        assert self.ended == dict.fromkeys(self.requests, FinishReason.LENGTH)
        assert max(self.step_cells) <= self.scheduler.rules.max_step_cells


def test_steps_are_as_full_as_they_may_be() -> None:
    run = Run(make_scheduler(500))
    run.add("a", 100, ExtractionSpec(tuple(range(9))))  # 900 cells
    run.add("b", 30, ExtractionSpec((1, 2, 3), positions=[0, 1, 2, 20]))
    run.add("c", 90, None)
    first = run.step().num_scheduled_tokens
    assert first == {"a": 55, "b": 1, "c": 72}  # 495 and 3 cells, 128 tokens
    run.finish()
    assert sum(run.step_cells) == 900 + 12


@pytest.mark.parametrize("seed", range(20))
def test_random_requests(seed: int) -> None:
    """No request waits for ever, whatever its layers and positions, in a small pool too."""
    rng = random.Random(seed)
    alignment = rng.choice([1, 16, 64])
    max_step_cells = rng.randint(12 * alignment, 12 * alignment + 1000)
    chunked = rng.random() < 0.7
    run = Run(
        make_scheduler(
            max_step_cells,
            alignment=alignment,
            num_blocks=rng.choice([60, 400]),
            chunked=chunked,
        )
    )
    for number in range(40):
        num_tokens, spec = rng.randint(1, MAX_MODEL_LEN - 1), None
        if rng.random() < 0.8:
            chosen = sorted(rng.sample(range(num_tokens), rng.randint(1, num_tokens)))
            positions = rng.choice([None, chosen, [num_tokens - 1]])
            if positions is not None:
                num_tokens = positions[-1] + 1
            spec = ExtractionSpec(tuple(range(rng.randint(1, 12))), positions)
        run.add(str(number), num_tokens, spec)
        if rng.random() < 0.5:
            run.step()
    run.finish()


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(1024, alignment=64)
    scheduler.add_request(make_request("fits", 300, ExtractionSpec((0,) * 16)))
    message = r"layers names 17 layers, but a step hands out at most 16 of 64 tokens.*=128"
    with pytest.raises(ValueError, match=message):
        scheduler.add_request(make_request("large", 300, ExtractionSpec((0,) * 17)))
    few = ExtractionSpec((0,) * 17, positions=[299])
    scheduler.add_request(make_request("few tokens", 300, few))


@pytest.mark.parametrize(
    ("lengths", "num_layers", "num_cells"),
    [([7937] + [1] * 255, 33, 65536), ([1] * 256, 33, 65536), ([40], 3, 320), ([64], 49, 3136)],
)
def test_the_profile_asks_for_as_much_as_a_step_may_hold(
    lengths: list[int], num_layers: int, num_cells: int
) -> None:
    specs = most_rows(lengths, num_layers, num_cells)
    cells = 0
    for spec, length in zip(specs, lengths, strict=True):
        assert spec.positions is not None
        assert spec.positions == list(range(len(spec.positions)))
        assert 0 < len(spec.positions) <= length
        cells += len(spec.layer_ids) * len(spec.positions)
    assert num_cells <= cells <= 1.05 * num_cells
    assert set(specs[0].layer_ids) == set(range(num_layers))
    assert len({spec.layer_ids for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    ("num_tokens", "num_layers", "chunk_tokens", "num_cells"),
    [(8192, 80, 64, 65536), (64, 80, 64, 81 * 64), (1, 32, 1, 33)],
)
def test_all_layers_of_what_cannot_be_divided_fit(
    num_tokens: int, num_layers: int, chunk_tokens: int, num_cells: int
) -> None:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=num_tokens),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: num_layers),
        device_config=SimpleNamespace(
            platform=SimpleNamespace(recurrent_chunk_tokens=chunk_tokens)
        ),
    )
    assert VllmConfig.max_step_cells.fget(config) == num_cells
