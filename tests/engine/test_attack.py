"""An attack on LLM: random calls from several threads, in tiny pools, against known results."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
)
from tests.engine.test_soak import fewest_blocks
from tests.grids import at_night
from tests.models.oracle import reference_run, relative_error
from vllm import LLM
from vllm.hidden_states import ExtractRequest, FailedSample, HiddenStatesSample

Checkpoint = Callable[..., Path]
Rows = dict[tuple[int, str], torch.Tensor]
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 65, 90, 130, 200]
LAYERS = ("0", "1,-1", "-1,0,2", ":", "2")
POSITIONS: tuple[Any, ...] = ("all", "last", "every:3", [0], slice(None, None, 2), "mask")
WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [1, 2], "positions": [2]},
    {"prompt": [1, 2], "positions": "odd"},
    {"prompt": [1, 2], "positions": "mask", "mask": [[1], [1]]},
    {"prompt": [1, 2], "positions": "mask", "mask": [1]},
    {"prompt": [1, 2], "positions": "mask", "mask": [None, 1]},
    {"prompt": [1, 2], "layers": [99]},
    {"prompt": [1] * 600},
    {"prompt": {"text": "x"}},
)
SECONDS = 300


def prompts_with_shared_starts() -> list[list[int]]:
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(31, LENGTHS)]
    return prompts + [prompts[-1][:cut] + prompts[3] for cut in (16, 50, 128)]


def positions_of(wanted: Any, num_tokens: int, mask: list[int]) -> list[int]:
    everything = list(range(num_tokens))
    if isinstance(wanted, slice):
        return everything[wanted]
    if wanted == "mask":
        return [index for index, value in enumerate(mask) if value]
    if isinstance(wanted, list):
        return wanted
    return {"all": everything, "last": everything[-1:], "every:3": everything[::3]}[wanted]


class Attack:
    """Calls of one thread. Everything that comes back is compared bit by bit."""

    def __init__(self, llm: LLM, prompts: list[list[int]], known: Rows, tokens: Any) -> None:
        self.llm, self.prompts, self.known, self.tokens = llm, prompts, known, tokens
        self.num_rows = 0

    def run(self, seed: int, num_calls: int) -> int:
        rng = random.Random(seed)
        for _ in range(num_calls):
            rng.choice((self.extract, self.extract, self.leave_early, self.generate))(rng)
        return self.num_rows

    def requests(self, rng: random.Random) -> Iterator[tuple[Any, int | None, list[int]]]:
        """(request, number of the prompt or None where it is wrong, mask)"""
        for _ in range(rng.randrange(1, 9)):
            if rng.random() < 0.2:
                yield ExtractRequest(**rng.choice(WRONG)), None, []
                continue
            number = rng.randrange(len(self.prompts))
            mask = [rng.randrange(3) for _ in self.prompts[number]]
            positions = rng.choice(POSITIONS)
            request = ExtractRequest(
                self.prompts[number],
                layers=rng.choice(LAYERS),
                positions=positions,
                mask=mask if positions == "mask" else None,
            )
            yield request, number, mask

    def extract(self, rng: random.Random) -> None:
        wanted = list(self.requests(rng))
        is_ordered = rng.random() < 0.5
        items = self.llm.extract(
            (request for request, _, _ in wanted),
            [1],
            ordered=is_ordered,
            on_error="yield",
            max_in_flight=rng.choice((None, 1, 3)),
        )
        seen = []
        for item in items:
            seen.append(item.index)
            self.check(item, *wanted[item.index])
        assert sorted(seen) == list(range(len(wanted)))
        assert not is_ordered or seen == sorted(seen)

    def leave_early(self, rng: random.Random) -> None:
        wanted = list(self.requests(rng))
        items = self.llm.extract([one for one, _, _ in wanted], [1], on_error="yield")
        with closing(items):  # type: ignore[type-var]
            self.check(next(items), *wanted[0])

    def check(self, item: Any, request: Any, number: int | None, mask: list[int]) -> None:
        if number is None:
            assert isinstance(item, FailedSample), request
            return
        assert isinstance(item, HiddenStatesSample), item
        rows = positions_of(request.positions, len(self.prompts[number]), mask)
        assert item.positions.tolist() == rows
        assert torch.equal(item.hidden_states, self.known[number, request.layers][rows])
        self.num_rows += len(rows)

    def generate(self, rng: random.Random) -> None:
        numbers = [rng.randrange(len(self.prompts)) for _ in range(rng.randrange(1, 5))]
        max_tokens = rng.randrange(1, 9)
        prompts = [{"prompt_token_ids": self.prompts[number]} for number in numbers]
        outputs = self.llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
        for number, output in zip(numbers, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == self.tokens[number][:max_tokens]


@pytest.mark.parametrize(
    ("family", "num_calls"), [("qwen3_5", 6), at_night("qwen3_5", 300), at_night("llama", 300)]
)
def test_random_calls_from_threads(family: str, num_calls: int, checkpoint: Checkpoint) -> None:
    folder, prompts = checkpoint(family), prompts_with_shared_starts()
    with engine(folder, enable_prefix_caching=False) as llm:
        known = {
            (number, layers): sample.hidden_states
            for number, prompt in enumerate(prompts)
            for layers in LAYERS
            for sample in llm.extract([prompt], layers)
        }
        alone = [{"prompt_token_ids": prompt} for prompt in prompts]
        tokens = [
            list(llm.generate(one, greedy(8), use_tqdm=False)[0].outputs[0].token_ids)
            for one in alone
        ]
        fewest = fewest_blocks(llm)
    for number in (0, 6, len(prompts) - 1):
        streams = reference_run(folder, prompts[number]).streams
        rows = known[number, ":"]
        for layer in range(rows.shape[1]):
            assert relative_error(rows[:, layer], streams[layer]) <= 1e-4
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 6}
    with engine(folder, num_gpu_blocks_override=fewest + 2, **options) as llm:
        attacks = [Attack(llm, prompts, known, tokens) for _ in range(4)]
        with ThreadPoolExecutor(len(attacks)) as threads:
            running = [
                threads.submit(attack.run, seed, num_calls) for seed, attack in enumerate(attacks)
            ]
            assert sum(one.result(SECONDS * num_calls / 6) for one in running) > 50
        check_nothing_is_left(llm)
        core_of(llm).scheduler.check_integrity()


@pytest.mark.exhaustive
def test_two_hundred_engines_in_one_process(checkpoint: Checkpoint) -> None:
    """Dropped without a word; threads, descriptors and memory come back."""
    from tests.engine.test_soak import num_open_files, resident_bytes

    folders = [checkpoint("llama"), checkpoint("qwen3_5")]

    def make(number: int) -> None:
        llm = LLM(str(folders[number % 2]), max_model_len=128, kv_cache_memory_bytes=2**22)
        if number % 3:
            assert len(list(llm.extract([[1, 2, 3]] * 3, [1]))) == 3
        if number % 5 == 0:
            llm.shutdown()

    for number in range(20):
        make(number)
    before = threading.active_count(), num_open_files(), resident_bytes()
    for number in range(200):
        make(number)
    after = threading.active_count(), num_open_files(), resident_bytes()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 32 << 20
