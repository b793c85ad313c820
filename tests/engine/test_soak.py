"""Many requests through a pool that is far too small: every file is right."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
from tests.grids import at_night
from tests.models.oracle import reference_run, relative_error
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.outputs import RequestOutput
from vllm.v1.core.kv_cache_utils import blocks_per_request

Checkpoint = Callable[..., Path]
LAYERS = [4, 0, 2]
MAX_TOKENS = (0, 1, 1, 2, 24)
MAX_QUEUED = 48
MAX_LENGTH = 400
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_LENGTH + max(MAX_TOKENS),
    "max_num_batched_tokens": 256,
    # Many start with a small chunk, so that there is no room for the rest of them.
    "long_prefill_token_threshold": 90,
}


def distinct_prompts(rng: random.Random) -> list[list[int]]:
    """Beginnings of a few texts, some of which go on in another way."""
    texts = [p["prompt_token_ids"] for p in random_prompts(41, [MAX_LENGTH] * 8)]
    prompts = [text[: rng.randint(1, MAX_LENGTH)] for text in texts for _ in range(4)]
    for _ in range(24):
        start = rng.choice(texts)[: rng.randint(1, 300)]
        prompts.append(start + rng.choice(texts)[: rng.randint(1, 90)])
    return [*prompts, texts[0], texts[1][:1]]


class Expected:
    """Tokens and rows of each prompt and its longest output, computed without any hurry."""

    def __init__(self, folder: Path, path: Path, prompts: list[list[int]]) -> None:
        config = extraction_config(LAYERS, path)
        options = {**OPTIONS, "enable_prefix_caching": False, "max_num_seqs": 4}
        with engine(folder, **options, **config) as llm:
            outputs = llm.generate(prompts, with_output_tokens(max(MAX_TOKENS)), use_tqdm=False)
        self.prompts = prompts
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.rows = [rows_of(output) for output in outputs]

    def check_against_transformers(self, folder: Path, index: int) -> None:
        tokens = self.prompts[index] + self.tokens[index]
        reference = reference_run(folder, tokens[:-1])
        for column, layer in enumerate(LAYERS):
            error = relative_error(self.rows[index][:, column], reference.streams[layer])
            assert error <= 1e-4

    def check(self, request: Plan, output: RequestOutput) -> None:
        """The reply and its file, which is then removed as a client does."""
        index, choice = request.prompt, output.outputs[0]
        assert choice.finish_reason == "length", choice.stop_reason
        assert list(choice.token_ids) == self.tokens[index][: request.max_tokens]
        assert output.kv_transfer_params is not None
        path = output.kv_transfer_params["hidden_states_path"]
        tensors = load_hidden_states(path)
        num_rows = len(self.prompts[index])
        if request.include_output_tokens:
            num_rows += max(request.max_tokens - 1, 0)
        tokens = self.prompts[index] + self.tokens[index]
        assert tensors["token_ids"].tolist() == tokens[:num_rows]
        assert torch.equal(tensors["hidden_states"], self.rows[index][:num_rows])
        cleanup_hidden_states(path)


@dataclass(frozen=True)
class Plan:
    """One request of the soak."""

    prompt: int
    max_tokens: int
    include_output_tokens: bool
    steps_to_live: int | None
    """Engine steps after which it is aborted; None: it may end."""


def plan_requests(rng: random.Random, num_requests: int, num_prompts: int) -> Iterator[Plan]:
    for _ in range(num_requests):
        yield Plan(
            prompt=rng.randrange(num_prompts),
            max_tokens=rng.choice(MAX_TOKENS),
            include_output_tokens=rng.random() < 0.5,
            steps_to_live=rng.randint(0, 40) if rng.random() < 0.1 else None,
        )


class Soak:
    """Keeps the queue of an engine full until the plans are used up."""

    def __init__(self, llm: LLM, expected: Expected, plans: Iterator[Plan]) -> None:
        self.engine = llm.llm_engine
        self.scheduler = core_of(llm).scheduler
        self.expected = expected
        self.plans = plans
        self.live: dict[str, Plan] = {}
        self.to_abort: dict[int, list[str]] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_aborted = 0
        self.num_checked = 0
        self.most_waiting = 0
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._counting_schedule

    def _counting_schedule(self) -> Any:
        scheduled = self._schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids)
        self.most_waiting = max(self.most_waiting, len(self.scheduler.waiting))
        return scheduled

    def run(self, num_requests: int) -> None:
        """Until so many requests have ended one way or the other."""
        while self.num_checked + self.num_aborted < num_requests:
            self._fill_queue()
            for request_id in self.to_abort.pop(self.num_steps, ()):
                self._abort(request_id)
            for output in self.engine.step():
                assert output.finished
                self.expected.check(self.live.pop(output.request_id), output)
                self.num_checked += 1
            self.num_steps += 1
            if self.num_steps % 32 == 0:
                self.scheduler.check_integrity()

    def _fill_queue(self) -> None:
        while len(self.live) < MAX_QUEUED and (plan := next(self.plans, None)) is not None:
            transfer = {"include_output_tokens": plan.include_output_tokens}
            params = greedy(
                plan.max_tokens, output_kind=2, extra_args={"kv_transfer_params": transfer}
            )
            number = self.num_checked + self.num_aborted + len(self.live)
            prompt = self.expected.prompts[plan.prompt]
            self.engine.add_request(str(number), prompt, params)
            self.live[str(number)] = plan
            if plan.steps_to_live is not None:
                due = self.num_steps + plan.steps_to_live
                self.to_abort.setdefault(due, []).append(str(number))

    def _abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.engine.abort_request([request_id])
            self.num_aborted += 1


def fewest_blocks(llm: LLM) -> int:
    """Blocks of the smallest pool that holds one request of the longest kind."""
    core = core_of(llm)
    return 1 + blocks_per_request(core.vllm_config, core.kv_cache_config.kv_cache_groups)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_requests", [200, at_night(2000)])
@pytest.mark.parametrize("family", [at_night("llama"), "qwen2", "qwen3_5"])
def test_requests_for_a_pool_that_is_too_small(
    family: str, num_requests: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    rng = random.Random(43)
    folder = checkpoint(family)
    expected = Expected(folder, tmp_path / "expected", distinct_prompts(rng))
    for index in rng.sample(range(len(expected.prompts)), 4):
        expected.check_against_transformers(folder, index)

    path = tmp_path / "soak"
    config = extraction_config(LAYERS, path)
    with engine(folder, **OPTIONS, **config) as llm:
        num_blocks = int(1.4 * fewest_blocks(llm))
    with engine(folder, **OPTIONS, num_gpu_blocks_override=num_blocks, **config) as llm:
        soak = Soak(llm, expected, plan_requests(rng, num_requests, len(expected.prompts)))
        soak.run(num_requests // 4)
        before = num_open_files(), resident_bytes()
        soak.run(num_requests)
        assert num_open_files() <= before[0] + 8, "files are left open"
        assert resident_bytes() - before[1] < 24 * 2**20, "memory grows with requests"
        assert soak.num_preemptions > num_requests // 40
        assert soak.num_aborted > num_requests // 40
        assert soak.most_waiting > MAX_QUEUED // 2
        assert soak.scheduler.stats().prefix_cache_hits > 0
        while llm.llm_engine.has_unfinished_requests():
            assert not llm.llm_engine.step()
    assert not list(path.iterdir()), "files, locks or temporary files are left"
