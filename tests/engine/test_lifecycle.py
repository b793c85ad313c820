"""Engines made, used side by side, freed and made again: nothing stays behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
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
from tests.models.oracle import reference_run, relative_error
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.model_executor.model_loader import loader
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core, front_end
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Checkpoint = Callable[..., Path]
POOL_BYTES = 2**26


# ---- side by side


def test_two_engines_in_one_process(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A dense one and a hybrid one of another dtype in turns; then one without the other."""
    dense, hybrid = checkpoint("llama"), checkpoint("qwen3_5", dtype=torch.bfloat16)
    with engine(hybrid, **extraction_config([4, 2], tmp_path / "alone")) as llm:
        (prompt,) = random_prompts(1, [50])
        expected = rows_of(llm.generate([prompt], with_output_tokens(5), use_tqdm=False)[0])
    with engine(hybrid, **extraction_config([4, 2], tmp_path / "hybrid")) as second:
        with engine(dense, **extraction_config([1, 3], tmp_path / "dense")) as first:
            for seed in range(3):
                check_dense(first, dense, seed)
                (output,) = second.generate([prompt], with_output_tokens(5), use_tqdm=False)
                assert torch.equal(rows_of(output), expected)
        (output,) = second.generate([prompt], with_output_tokens(5), use_tqdm=False)
        assert torch.equal(rows_of(output), expected)


def check_dense(llm: LLM, folder: Path, seed: int) -> None:
    (prompt,) = random_prompts(seed, [37 + seed])
    (output,) = llm.generate([prompt], greedy(), use_tqdm=False)
    reference = reference_run(folder, prompt["prompt_token_ids"])
    for column, layer in enumerate([1, 3]):
        assert relative_error(rows_of(output)[:, column], reference.streams[layer]) <= 1e-4


def test_two_engines_on_two_threads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = random_prompts(2, [40, 7, 90])
    with (
        engine(checkpoint("llama"), **extraction_config([1, 4], tmp_path)) as first,
        engine(checkpoint("qwen3_5"), **extraction_config([1, 4], tmp_path)) as second,
    ):
        expected = {llm: all_rows(llm, prompts) for llm in (first, second)}
        found: dict[LLM, list[list[torch.Tensor]]] = {first: [], second: []}

        def work(llm: LLM) -> None:
            for _ in range(4):
                llm.reset_prefix_cache()
                found[llm].append(all_rows(llm, prompts))

        threads = [threading.Thread(target=work, args=(llm,)) for llm in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for llm, runs in found.items():
            assert len(runs) == 4
            for rows in runs:
                assert all(map(torch.equal, rows, expected[llm]))


def all_rows(llm: LLM, prompts: list[Any]) -> list[torch.Tensor]:
    return [rows_of(o) for o in llm.generate(prompts, with_output_tokens(4), use_tqdm=False)]


# ---- freed


class Resources(NamedTuple):
    """Resources of the system that this process holds."""

    threads: int
    descriptors: int
    children: int

    @classmethod
    def now(cls) -> Resources:
        process = psutil.Process()
        # Progress bars of other libraries, in other tests, come and go with theirs.
        monitors = sum(thread.name == "tqdm_monitor" for thread in threading.enumerate())
        num_threads = process.num_threads() - monitors
        return cls(num_threads, process.num_fds(), len(process.children()))

    def settled(self) -> Resources:
        """Return what is held now, or soon: a thread that was joined may still be leaving."""
        deadline = time.monotonic() + 5
        while (now := Resources.now()) != self and time.monotonic() < deadline:
            pass
        return now


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class Parts:
    """Counts the large parts of engines made from now on that are still in memory."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Any]] = []

    def watch(self, *parts: Any) -> None:
        self.references += [weakref.ref(part) for part in parts]

    @property
    def num_alive(self) -> int:
        return sum(reference() is not None for reference in self.references)


def make_and_use(folder: Path, storage: Path, parts: Parts) -> LLM:
    """An engine that has served, with every byte of its pool touched."""
    llm = LLM(str(folder), kv_cache_memory_bytes=POOL_BYTES, **extraction_config([1, 4], storage))
    runner = core_of(llm).executor.worker.model_runner
    runner.pool.fill_(-1)
    for output in llm.generate(random_prompts(3, [40, 130]), greedy(3), use_tqdm=False):
        assert rows_of(output).isfinite().all()
    parts.watch(runner, runner.model, runner.pool, runner.connector.connector)
    return llm


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("how", ["del", "shutdown"])
def test_made_again_and_again(
    family: str, how: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    del_or_shut_down(make_and_use(folder, tmp_path, Parts()), how)  # what is loaded once
    gc.collect()
    # The least of some looks: a thread that was joined may still be leaving.
    resources, memory = min(Resources.now() for _ in range(200)), resident_bytes()
    for _ in range(5):
        parts = Parts()
        llm = make_and_use(folder, tmp_path, parts)
        assert parts.num_alive == 4
        assert Resources.now().threads > resources.threads
        if how == "shutdown":
            llm.shutdown()
            gc.collect()
            assert parts.num_alive == 0  # although llm is there
        del llm
        gc.collect()
        assert parts.num_alive == 0
        assert resources.settled() == resources
    assert resident_bytes() - memory < POOL_BYTES / 2


def del_or_shut_down(llm: LLM, how: str) -> None:
    if how == "shutdown":
        llm.shutdown()


def test_a_with_block_shuts_down(checkpoint: Checkpoint, tmp_path: Path) -> None:
    parts = Parts()
    with make_and_use(checkpoint("llama"), tmp_path, parts) as llm:
        assert parts.num_alive == 4
    gc.collect()
    assert parts.num_alive == 0
    llm.shutdown()  # may be called again
    with pytest.raises(RuntimeError, match="this engine was shut down: make a new one"):
        llm.generate([[1]], greedy(), use_tqdm=False)
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.llm_engine.step()


# ---- never quite made


@pytest.fixture
def runner_parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Watches the runner of every engine that begins to be made, and what it loads."""
    parts = Parts()
    make, load, allocate = (
        GPUModelRunner.__init__,
        GPUModelRunner.load_model,
        GPUModelRunner.initialize_kv_cache,
    )

    def watched_make(self: Any, *args: Any) -> None:
        parts.watch(self)
        make(self, *args)

    def watched_load(self: Any) -> None:
        load(self)
        parts.watch(self.model)

    def watched_allocate(self: Any, config: Any) -> None:
        allocate(self, config)
        parts.watch(self.pool)

    monkeypatch.setattr(GPUModelRunner, "__init__", watched_make)
    monkeypatch.setattr(GPUModelRunner, "load_model", watched_load)
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", watched_allocate)
    return parts


def fail(*_: Any, **__: Any) -> Any:
    raise ValueError("made to fail")


@pytest.mark.parametrize(
    ("place", "num_parts"),
    [
        ((loader, "load_checkpoint"), 1),
        ((core, "get_kv_cache_configs"), 2),
        ((KVCacheConfig, "layer_views"), 2),
        ((ExampleHiddenStatesConnector, "register_kv_caches"), 2),
        ((Scheduler, "__init__"), 3),
        ((front_end, "InputProcessor"), 3),
    ],
)
def test_an_engine_that_fails_to_start_leaves_nothing(
    place: tuple[Any, str],
    num_parts: int,
    checkpoint: Checkpoint,
    tmp_path: Path,
    runner_parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint("qwen3_5")
    with engine(folder, **extraction_config([1], tmp_path)):
        pass
    runner_parts.references.clear()
    resources = Resources.now()
    owner, name = place
    monkeypatch.setattr(owner, name, fail)
    for attempt in range(1, 3):
        message = ""
        try:
            LLM(str(folder), kv_cache_memory_bytes=2**22, **extraction_config([1], tmp_path))
        except ValueError as error:
            message = str(error)
        assert message == "made to fail"
        assert len(runner_parts.references) == attempt * num_parts
        gc.collect()
        assert runner_parts.num_alive == 0
        assert resources.settled() == resources
    assert os.listdir(tmp_path) == []
