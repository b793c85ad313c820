"""``ExtractingDataset``: samples for a trainer while an engine extracts them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.engine.harness import engine, greedy, random_prompts
from vllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.hidden_states import ExtractRequest, HiddenStatesError, HiddenStatesSample, pad_samples
from vllm.training import ExtractingDataset
from vllm.training.background_engine import SampleQueue
from vllm.v1.engine.exceptions import EngineDeadError

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 17, 1, 60, 8, 21]
PROMPTS = random_prompts(11, LENGTHS)
LAYERS: list[Any] = [2, "norm"]


@pytest.fixture(scope="module")
def arguments(checkpoint: Checkpoint) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        str(checkpoint("qwen3_5")), max_model_len=128, kv_cache_memory_bytes=2**24
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[HiddenStatesSample]:
    with engine(checkpoint("qwen3_5")) as llm:
        return list(llm.extract(PROMPTS, LAYERS))


@pytest.fixture(scope="module")
def dataset(arguments: AsyncEngineArgs) -> Iterator[ExtractingDataset]:
    """One engine for the tests that only read."""
    with ExtractingDataset(arguments, PROMPTS, LAYERS, shuffle=True, seed=3) as dataset:
        yield dataset


def indices(samples: Any) -> list[int]:
    return [sample.index for sample in samples]


def assert_same(samples: list[HiddenStatesSample], expected: list[HiddenStatesSample]) -> None:
    for sample in samples:
        other = expected[sample.index]
        assert torch.equal(sample.hidden_states, other.hidden_states)
        assert torch.equal(sample.token_ids, other.token_ids)
        assert torch.equal(sample.positions, other.positions)
        assert sample.layer_ids == other.layer_ids


class Shuffled:
    """A column of a table of pandas that was shuffled: its labels are no longer the places."""

    def __init__(self, values: Any) -> None:
        self._values = list(values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __getitem__(self, label: int) -> Any:
        return self._values[-1 - label]


def test_epochs_have_all_samples_in_other_orders(
    dataset: ExtractingDataset, expected: list[HiddenStatesSample]
) -> None:
    dataset.set_epoch(0)
    assert len(dataset) == len(PROMPTS)
    epochs = [list(dataset) for _ in range(3)]
    for samples in epochs:
        assert sorted(indices(samples)) == list(range(len(PROMPTS)))
        assert_same(samples, expected)
    orders = [indices(samples) for samples in epochs]
    assert len({tuple(order) for order in orders}) == 3
    dataset.set_epoch(1)
    assert indices(dataset) == orders[1]


def test_an_iteration_that_is_left_begins_anew(dataset: ExtractingDataset) -> None:
    dataset.set_epoch(5)
    whole = indices(dataset)
    for _ in range(2):
        dataset.set_epoch(5)
        items = iter(dataset)
        assert [next(items).index for _ in range(2)] == whole[:2]
        with pytest.raises(RuntimeError, match="another iteration is under way"):
            iter(dataset)
        items.close()  # type: ignore[attr-defined]


def test_an_epoch_that_is_chosen_meanwhile_is_the_next_one(dataset: ExtractingDataset) -> None:
    """The state stays that of the iteration under way."""
    dataset.set_epoch(9)
    later = indices(dataset)
    for ends in (True, False):
        dataset.set_epoch(5)
        items = iter(dataset)
        next(items)
        dataset.set_epoch(9)
        next(items)
        state = dataset.state_dict()
        assert (state["epoch"], state["num_read"]) == (5, 2)
        with pytest.raises(RuntimeError, match="load_state_dict: an iteration is under way"):
            dataset.load_state_dict(state)
        list(items) if ends else items.close()  # type: ignore[attr-defined]
        assert dataset.state_dict()["epoch"] == 9
        assert indices(dataset) == later


@pytest.mark.parametrize("batch_size", [1, 3])
def test_it_goes_on_after_the_last_batch(dataset: ExtractingDataset, batch_size: int) -> None:
    """A DataLoader that read some batches, then another one with its state; set_epoch between."""
    dataset.set_epoch(8)
    whole, after = indices(dataset), indices(dataset)
    dataset.set_epoch(8)
    batches = iter(DataLoader(dataset, batch_size, collate_fn=pad_samples))
    read = [index for _ in range(2) for index in next(batches).samples.tolist()]
    state = dataset.state_dict()
    del batches
    assert read == whole[: 2 * batch_size]
    dataset.load_state_dict(state)
    dataset.set_epoch(8)
    assert indices(dataset) == whole[2 * batch_size :]
    assert indices(dataset) == after
    assert dataset.state_dict()["epoch"] == 10
    with pytest.raises(ValueError, match="state_dict: seed was 4, and is 3 now"):
        dataset.load_state_dict({**state, "seed": 4})
    with pytest.raises(ValueError, match="state_dict=None: has to be what"):
        dataset.load_state_dict(None)  # type: ignore[arg-type]
    wrong: dict[str, Any]
    for wrong in ({"num_read": -1}, {"num_read": 8}, {"num_read": "2"}, {"epoch": None}):
        with pytest.raises(ValueError, match=f"state_dict: {next(iter(wrong))}="):
            dataset.load_state_dict({**state, **wrong})


def test_a_state_belongs_to_its_prompts() -> None:
    def state_of(prompts: list[Any], **options: Any) -> dict[str, Any]:
        return ExtractingDataset("none", prompts, LAYERS, **options).state_dict()

    talk = [{"role": "user", "content": "a"}]
    prompts = [talk, "b", torch.tensor([1, 2]), ExtractRequest("c"), *"defghijklmnopqrstuvw"]
    state = state_of(prompts)
    same = [[dict(talk[0])], "b", [1, 2], ExtractRequest("c", layers=1), *prompts[4:]]
    assert state_of(same) == state
    for place in (0, 2, 22):
        others = [*prompts[:place], "other", *prompts[place + 1 :]]
        with pytest.raises(ValueError, match="state_dict: prompts was"):
            ExtractingDataset("none", others, LAYERS).load_state_dict(state)
    for key in ("epoch", "num_read"):
        with pytest.raises(ValueError, match=f"{key}=True: has to be a whole number"):
            ExtractingDataset("none", prompts, LAYERS).load_state_dict({**state, key: True})


def test_ranks_share_the_samples(arguments: AsyncEngineArgs) -> None:
    """Each sample goes to one rank; those beyond the last whole round to none."""
    orders = []
    for rank in range(3):
        part = ExtractingDataset(arguments, PROMPTS, LAYERS, shuffle=True, rank=rank, world_size=3)
        assert len(part) == 2
        orders.append(part._order())
    assert all(len(order) == 2 for order in orders)
    assert len({index for order in orders for index in order}) == 6
    bad = ({"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": 1}, {"rank": 0.0})
    for arguments_of_rank in bad:
        with pytest.raises(ValueError, match=r"rank=.*has to be from 0 to"):
            ExtractingDataset(arguments, PROMPTS, **arguments_of_rank)
    with pytest.raises(ValueError, match="world_size=0: has to be a whole number of at least 1"):
        ExtractingDataset(arguments, PROMPTS, world_size=0)


def test_ranks_of_torch_are_noticed(
    arguments: AsyncEngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"torch.distributed has 2 ranks; pass"):
        ExtractingDataset(arguments, PROMPTS)
    assert len(ExtractingDataset(arguments, PROMPTS, world_size=1)) == len(PROMPTS)


def test_all_options_reach_the_engine(
    arguments: AsyncEngineArgs, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with options of their own, columns, and a transform."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(Series=Shuffled))
    options: dict[str, Any] = {
        "layers": 1,
        "positions": "every:2",
        "dtype": "float16",
        "hooks": ["blocks.1.hook_out"],
        "top_logprobs": 3,
    }
    requests = [*PROMPTS[:2], ExtractRequest(PROMPTS[2], layers=[0], mask=[1, 0] * 8 + [1])]
    with engine(checkpoint("qwen3_5")) as llm:
        expected = list(llm.extract(requests, **options))
    columns = {"label": Shuffled("abc")}

    def transform(sample: HiddenStatesSample) -> tuple[HiddenStatesSample, int]:
        return sample, len(sample.token_ids)

    with ExtractingDataset(
        arguments, Shuffled(requests), columns=columns, transform=transform, **options
    ) as dataset:
        samples = list(dataset)
    for (sample, length), other in zip(samples, expected, strict=True):
        assert length == len(other.token_ids)
        assert sample.columns == {"label": "abc"[sample.index]}
        assert sample.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert torch.equal(sample.tensors[name].nan_to_num(9), tensor.nan_to_num(9))


def test_generated_tokens(arguments: AsyncEngineArgs) -> None:
    with ExtractingDataset(arguments, PROMPTS, LAYERS, sampling_params=greedy(4)) as dataset:
        samples = list(dataset)
    assert [len(sample.token_ids) for sample in samples] == [length + 4 for length in LENGTHS]
    with pytest.raises(ValueError, match="sampling_params: n=2"):
        ExtractingDataset(arguments, PROMPTS, sampling_params=SamplingParams(n=2))


def test_failures(arguments: AsyncEngineArgs) -> None:
    """A sample that cannot be extracted ends the iteration, or is left out; others are whole."""
    prompts = [PROMPTS[0], {"prompt_token_ids": [1] * 400}, PROMPTS[1]]
    with ExtractingDataset(arguments, prompts, LAYERS) as dataset:
        items = iter(dataset)
        assert next(items).index == 0
        with pytest.raises(HiddenStatesError, match=r"prompt 1: .*400"):
            next(items)
        dataset._skips = True
        assert indices(dataset) == [0, 2]
        assert dataset.num_skipped == 1
        dataset.load_state_dict({**dataset.state_dict(), "epoch": 0, "num_read": 2})
        assert indices(dataset) == [2]


def test_prompts_that_ask_for_several_texts(arguments: AsyncEngineArgs, tmp_path: Path) -> None:
    """Each such prompt fails by itself, as others do."""
    two = ExtractRequest(PROMPTS[1], sampling_params=SamplingParams(n=2, temperature=1.0))
    prompts = [PROMPTS[0], two, PROMPTS[2]]
    options: dict[str, Any] = {"on_error": "skip", "cache": str(tmp_path)}
    with ExtractingDataset(arguments, prompts, LAYERS, **options) as dataset:
        assert [indices(dataset) for _ in range(2)] == [[0, 2], [0, 2]]
        assert dataset.num_skipped == 2
        dataset._skips = False
        with pytest.raises(HiddenStatesError, match=r"prompt 1: .*n=2, but n has to be 1"):
            indices(dataset)


class Ending(list[Any]):
    """Prompts, one of which cannot be read."""

    def __init__(self, prompts: list[Any], error: BaseException) -> None:
        super().__init__(prompts)
        self.error: BaseException | None = error

    def __getitem__(self, index: Any) -> Any:
        if index == 2 and self.error is not None:
            raise self.error
        return super().__getitem__(index)


def test_prompts_and_transforms_that_raise(arguments: AsyncEngineArgs) -> None:
    """The trainer gets the error, nothing runs any more, and the next iteration is whole."""
    prompts = Ending(PROMPTS, KeyError("no such prompt"))
    with ExtractingDataset(arguments, prompts, LAYERS) as dataset:
        with pytest.raises(KeyError, match="no such prompt"):
            list(dataset)
        for error in (SystemExit(1), GeneratorExit(), StopIteration()):
            prompts.error = error
            with pytest.raises(RuntimeError, match=rf"prompts\[2\] raised {type(error).__name__}"):
                list(dataset)
        prompts.error = None

        def fail(sample: HiddenStatesSample) -> None:
            raise OSError("cannot be transformed")

        dataset._transform = fail
        with pytest.raises(OSError, match="cannot be transformed") as kept:
            next(iter(dataset))
        engine, dataset._transform = dataset._engine, None
        assert engine is not None and kept.value.__traceback__ is not None
        tasks = asyncio.run_coroutine_threadsafe(_names_of_tasks(), engine._loop).result()
        assert not [name for name in tasks if "_fill" in name]
        first, second = iter(dataset), iter(dataset)
        assert next(first).index == 0
        with pytest.raises(RuntimeError, match="another iteration is under way"):
            next(second)
        assert len(list(first)) == len(PROMPTS) - 1


async def _names_of_tasks() -> list[str]:
    return [repr(task.get_coro()) for task in asyncio.all_tasks()]


def test_the_end_of_the_engine_is_an_error(arguments: AsyncEngineArgs) -> None:
    """It is raised where the trainer waits; the next iteration starts another engine."""
    prompts = random_prompts(5, [60] * 400)
    with ExtractingDataset(arguments, prompts, LAYERS, prefetch_bytes=1) as dataset:
        items = iter(dataset)
        next(items)
        assert dataset._engine is not None
        os.kill(dataset._engine.llm.core_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            list(items)
        dataset.set_epoch(1)
        assert len(list(dataset)) == len(prompts)


def test_close_from_another_thread_ends_a_trainer_that_waits(arguments: AsyncEngineArgs) -> None:
    prompts = random_prompts(5, [100] * 3000)
    dataset = ExtractingDataset(arguments, prompts, LAYERS)
    before = set(threading.enumerate())
    items = iter(dataset)
    next(items)
    timer = threading.Timer(0.3, dataset.close)
    timer.start()
    with pytest.raises(EngineDeadError):
        list(items)
    timer.join()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name


def test_a_slow_trainer_does_not_wait(
    arguments: AsyncEngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs ahead as far as it may, and no further."""
    prompts = random_prompts(5, [64] * 60)
    sample_bytes = 64 * len(LAYERS) * 72 * 4
    waiting: list[SampleQueue] = []
    make = SampleQueue.__init__

    def noted(queue: SampleQueue, most_bytes: int) -> None:
        waiting.append(queue)
        make(queue, most_bytes)

    monkeypatch.setattr(SampleQueue, "__init__", noted)
    most = 8 * sample_bytes + 5
    with ExtractingDataset(arguments, prompts, LAYERS, prefetch_bytes=most) as dataset:
        items = iter(dataset)
        next(items)
        while len(waiting[0]._items) < 8:
            time.sleep(0.02)
        time.sleep(0.3)
        assert len(waiting[0]._items) == 8
        before = dataset.waited_seconds
        for _ in range(8):
            next(items)
        assert dataset.waited_seconds - before < 0.02
        items.close()  # type: ignore[attr-defined]


def test_workers_of_a_loader_are_refused(arguments: AsyncEngineArgs) -> None:
    dataset = ExtractingDataset(arguments, PROMPTS, LAYERS)
    with pytest.raises(RuntimeError, match="use num_workers=0"):
        list(DataLoader(dataset, num_workers=1, collate_fn=pad_samples))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_bytes": 0}, "prefetch_bytes=0"),
        ({"cache_bytes": 1.5, "cache": "folder"}, "cache_bytes=1.5: has to be a whole number"),
        ({"cache_bytes": 1 << 30}, "cache_bytes=1073741824: is of use only with cache=FOLDER"),
        ({"prefetch_bytes": True}, "prefetch_bytes=True: has to be a whole number"),
        ({"shuffle": "no"}, "shuffle='no': has to be true or false"),
        ({"on_error": "yield"}, "on_error='yield'"),
        ({"columns": [1] * 7}, r"columns=\[1, .*: has to be a dict"),
        ({"transform": 5}, "transform=5: has to be a function"),
        ({"seed": "a"}, "seed='a': has to be a whole number"),
        ({"prompts": "one text"}, "prompts='one text': has to be a list of prompts"),
        ({"prompts": iter(["a"])}, "prompts=.*iterator.*: has to be a list of prompts"),
        ({"columns": {"a": [1]}}, r"columns\['a'\]: 1 values for 7 prompts"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"cache": "x", "sampling_params": greedy(2)}, "cache: not together"),
    ],
)
def test_bad_arguments(arguments: AsyncEngineArgs, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtractingDataset(arguments, **{"prompts": PROMPTS, **options})


def test_epochs_that_do_not_exist(arguments: AsyncEngineArgs) -> None:
    dataset = ExtractingDataset(arguments, PROMPTS, LAYERS)
    for epoch in ("1", -1, 1.0, None):
        with pytest.raises(ValueError, match=r"set_epoch: epoch=.* has to be a whole number"):
            dataset.set_epoch(epoch)  # type: ignore[arg-type]
    dataset.set_epoch(np.int64(3))
    assert dataset.state_dict()["epoch"] == 3 and type(dataset.state_dict()["epoch"]) is int


def test_a_checkpoint_that_is_missing() -> None:
    dataset = ExtractingDataset("/there/is/none", PROMPTS)
    for _ in range(2):
        with pytest.raises(ValueError, match="/there/is/none"):
            list(dataset)


def test_interrupted_and_closed_in_the_middle(
    arguments: AsyncEngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while the engine starts leaves nothing of it."""
    dataset = ExtractingDataset(arguments, PROMPTS, LAYERS, prefetch_bytes=1)
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    start = AsyncLLM.start

    async def interrupted(llm: AsyncLLM) -> Any:
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
        return await start(llm)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncLLM, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(dataset))
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # it may be ending
        assert not thread.is_alive(), thread
    assert len(os.listdir("/proc/self/fd")) <= before
    samples = iter(dataset)
    next(samples)
    dataset.close()
    with pytest.raises(EngineDeadError, match="shut down while its samples were read"):
        list(samples)


FORGOTTEN = """
import sys
from vllm import AsyncEngineArgs
from vllm.training import ExtractingDataset

if __name__ == "__main__":
    arguments = AsyncEngineArgs(sys.argv[1], max_model_len=128, kv_cache_memory_bytes=2**24)
    dataset = ExtractingDataset(arguments, [[3, 5], [7]], 2)
    samples = iter(dataset)
    print(next(samples).index, flush=True)
"""
LEFT_OPEN = """
import asyncio, sys
from vllm import AsyncEngineArgs, AsyncLLM

async def main():
    global llm, samples
    arguments = AsyncEngineArgs(sys.argv[1], max_model_len=128, kv_cache_memory_bytes=2**24)
    llm = AsyncLLM.from_engine_args(arguments)
    samples = llm.extract([[3, 5]] * 500, 2)
    async for sample in samples:
        print(sample.index, flush=True)
        break

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", [FORGOTTEN, LEFT_OPEN], ids=["dataset", "extract"])
def test_a_script_that_does_not_close_it_ends_quietly(
    arguments: AsyncEngineArgs, tmp_path: Path, text: str
) -> None:
    """At the end of the interpreter no thread can be started to wait for the engine, and at that
    of a loop all generators are closed at once."""
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), str(arguments.model)]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "Error" not in done.stderr, done.stderr


def test_a_start_that_is_forgotten_with_its_loop(arguments: AsyncEngineArgs) -> None:
    loop = asyncio.new_event_loop()
    llm = AsyncLLM.from_engine_args(arguments)
    starting = loop.create_task(llm.start())
    loop.run_until_complete(asyncio.sleep(0.2))
    loop.close()
    del starting, llm
    gc.collect()  # it must not wait for sockets that are garbage themselves
