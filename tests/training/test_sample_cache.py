"""Samples that an ``ExtractingDataset`` stores for later epochs and runs."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import greedy, random_prompts
from tests.models.checkpoints import make_checkpoint
from tests.training.test_extracting_dataset import LAYERS, PROMPTS, indices
from vllm import AsyncEngineArgs, SamplingParams
from vllm.hidden_states import ExtractRequest, HiddenStatesSample
from vllm.training import ExtractingDataset
from vllm.v1.engine.async_llm import AsyncLLM

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def arguments(checkpoint: Checkpoint) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        str(checkpoint("mixtral")), max_model_len=128, kv_cache_memory_bytes=2**24
    )


class Computed:
    """Counts the requests that the engine gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = AsyncLLM.run

        def counted(llm: AsyncLLM, processed: Any) -> Any:
            self.count += 1
            return run(llm, processed)

        monkeypatch.setattr(AsyncLLM, "run", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def same(samples: list[HiddenStatesSample], others: list[HiddenStatesSample]) -> None:
    for sample, other in zip(samples, others, strict=True):
        assert sample.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert torch.equal(sample.tensors[name].nan_to_num(9), tensor.nan_to_num(9)), name
        kept = (sample.index, sample.layer_ids, sample.constants, sample.columns)
        assert kept == (other.index, other.layer_ids, other.constants, other.columns)
        assert torch.equal(sample.token_ids, other.token_ids)
        assert torch.equal(sample.positions, other.positions)


def test_epochs_and_runs_share_what_is_stored(
    arguments: AsyncEngineArgs, tmp_path: Path, computed: Computed
) -> None:
    """Only what a run needs and does not find is computed; damaged files count as absent."""
    asked: dict[str, Any] = {"cache": str(tmp_path), "columns": {"label": list("abcdefg")}}
    asked |= {"hooks": "blocks.1.hook_mlp_out", "top_logprobs": 2, "dtype": "bfloat16"}
    traced = dataclasses.replace(arguments, expert_trace=True)
    with ExtractingDataset(traced, PROMPTS, LAYERS, **asked) as dataset:
        first = list(dataset)
        assert computed.take() == len(PROMPTS)
        same(list(dataset), first)
        assert computed.take() == 0
    damaged = files(tmp_path)[3]
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    files(tmp_path)[5].write_bytes(b"")
    with ExtractingDataset(traced, PROMPTS, LAYERS, **asked) as dataset:
        same(list(dataset), first)
        assert computed.take() == 2
    others = [*PROMPTS[:3], *random_prompts(99, [9]), *PROMPTS[4:]]
    with ExtractingDataset(traced, others, LAYERS, **asked) as dataset:
        samples = list(dataset)
        assert computed.take() == 1
        assert len(samples[3].token_ids) == 9
        same(samples[4:], first[4:])
    asked["dtype"] = "float16"
    with ExtractingDataset(traced, PROMPTS, LAYERS, **asked) as dataset:
        assert {sample.hidden_states.dtype for sample in dataset} == {torch.float16}
        assert computed.take() == len(PROMPTS)


def test_the_limit_counts_everything_in_the_folder(
    arguments: AsyncEngineArgs, tmp_path: Path, computed: Computed
) -> None:
    prompts = random_prompts(7, [40] * 8)
    (tmp_path / "other").write_bytes(bytes(20_000))
    limit = 20_000 + 3 * 25_000
    cached: dict[str, Any] = {"cache": str(tmp_path), "cache_bytes": limit}
    with ExtractingDataset(arguments, prompts, LAYERS, **cached) as dataset:
        first = list(dataset)
        assert computed.take() == 8
        size = sum(path.stat().st_size for path in files(tmp_path))
        assert limit - 25_000 < size <= limit
        same(list(dataset), first)
        assert computed.take() == 8 - (len(files(tmp_path)) - 1)
        assert indices(dataset) == list(range(8))


@pytest.mark.exhaustive
def test_a_tokenizer_that_changes_makes_other_samples(
    checkpoint: Checkpoint, tmp_path: Path, computed: Computed
) -> None:
    """Texts are stored by what they say, so their tokens are part of what they stand for."""
    model = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    options = {"cache": str(tmp_path / "cache")}
    args = AsyncEngineArgs(str(model), max_model_len=128, kv_cache_memory_bytes=2**24)
    with ExtractingDataset(args, ["some text", "other"], LAYERS, **options) as dataset:
        first = list(dataset)
    path = model / "tokenizer.json"
    stated = json.loads(path.read_text())
    vocabulary = stated["model"]["vocab"]
    a, b = first[0].token_ids[-2:].tolist()
    names = {number: token for token, number in vocabulary.items()}
    vocabulary[names[a]], vocabulary[names[b]] = b, a
    path.write_text(json.dumps(stated))
    assert computed.take() == 2
    with ExtractingDataset(args, ["some text", "other"], LAYERS, **options) as dataset:
        second = list(dataset)
    assert computed.take() == 2
    assert not torch.equal(first[0].token_ids, second[0].token_ids)


@pytest.mark.exhaustive
def test_weights_that_change_while_the_engine_is_closed(
    checkpoint: Checkpoint, tmp_path: Path, computed: Computed
) -> None:
    """One dataset, whose second engine loads other weights from the same folder."""
    model = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    args = AsyncEngineArgs(str(model), max_model_len=128, kv_cache_memory_bytes=2**24)
    found = []
    with ExtractingDataset(args, PROMPTS[:2], LAYERS, cache=str(tmp_path / "cache")) as dataset:
        for seed in (None, 5, 5):
            dataset.close()
            if seed is not None:
                make_checkpoint(model, "mixtral", seed=seed)
            found.append(list(dataset))
    assert computed.take() == 4
    assert not torch.equal(found[0][0].hidden_states, found[1][0].hidden_states)
    same(found[1], found[2])


@pytest.mark.exhaustive
def test_samples_that_may_differ_each_time_are_not_stored(
    arguments: AsyncEngineArgs, tmp_path: Path, computed: Computed
) -> None:
    requests = [PROMPTS[0], ExtractRequest(PROMPTS[1], sampling_params=greedy(2))]
    with ExtractingDataset(arguments, requests, LAYERS, cache=str(tmp_path)) as dataset:
        for count in (2, 1):
            lengths = [len(sample.token_ids) for sample in dataset]
            assert lengths == [len(one["prompt_token_ids"]) for one in PROMPTS[:1]] + [35]
            assert computed.take() == count
    assert len(files(tmp_path)) == 1
    several = [ExtractRequest(PROMPTS[1], sampling_params=SamplingParams(n=2))]
    with (
        ExtractingDataset(arguments, several, LAYERS) as dataset,
        pytest.raises(ValueError, match="sampling_params: n=2"),
    ):
        list(dataset)


def test_a_full_disk_ends_the_storing_only(
    arguments: AsyncEngineArgs,
    tmp_path: Path,
    computed: Computed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.training import sample_cache

    write, num_written = sample_cache._write, []

    def full(path: str, parts: Any) -> None:
        if len(num_written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written.append(path)
        write(path, parts)

    monkeypatch.setattr(sample_cache, "_write", full)
    with ExtractingDataset(arguments, PROMPTS, LAYERS, cache=str(tmp_path)) as dataset:
        first = list(dataset)
        same(list(dataset), first)
    assert computed.take() == 2 * len(PROMPTS) - 2
    assert len(files(tmp_path)) == 2


def test_a_folder_that_cannot_be_written(arguments: AsyncEngineArgs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cached = {"cache": str(tmp_path / "file")}
    with (
        ExtractingDataset(arguments, PROMPTS, LAYERS, **cached) as dataset,
        pytest.raises(OSError, match="file"),
    ):
        list(dataset)
