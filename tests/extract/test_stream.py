"""``vllm extract --stream``: samples go to a trainer instead of a folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.extract.fake_engine import FAILING_TOKEN, fake_rows, load_fake
from tests.extract.job_harness import HIDDEN_SIZE, LAYERS, token_lists, write_jsonl
from tests.models.checkpoints import make_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.exceptions import FailureError, FailureKind
from vllm.training import StreamedDataset, StreamError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def run(model: Path, data: Path, path: str, **options: Any) -> int:
    merged: dict[str, Any] = {"layers": "0,3,last", **options}
    arguments = ExtractOptions(input=[str(data)], stream=path, **merged)
    return run_job(arguments, EngineArgs(model=str(model)), load_fake)  # type: ignore[arg-type]


def test_a_reader_gets_every_sample(model: Path, tmp_path: Path) -> None:
    lists = token_lists(5, 37)
    lists[8] = [1, FAILING_TOKEN, 2]
    records = [{"input_ids": ids, "label": i % 3} for i, ids in enumerate(lists)]
    data, path = write_jsonl(tmp_path / "data.jsonl", records), str(tmp_path / "rows.sock")
    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(run(model, data, path, keep_columns=["label"]))
    )
    thread.start()
    dataset = StreamedDataset(path, timeout=60, on_error="skip")
    samples = list(dataset)
    thread.join()
    assert statuses == [0]
    assert [one.index for one in samples] == [i for i in range(37) if i != 8]
    assert dataset.num_skipped == 1
    for one in samples:
        assert one.token_ids.tolist() == lists[one.index]
        assert one.columns["label"] == one.index % 3
        assert one.record == one.index
        assert one.hidden_states.equal(fake_rows(lists[one.index], LAYERS, HIDDEN_SIZE))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]


def test_a_reader_that_does_not_come_ends_the_job(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2]}])
    with pytest.raises(StreamError, match="no reader connected") as raised:
        run(model, data, str(tmp_path / "rows.sock"), stream_timeout=0.2)
    assert raised.value.failure.kind is FailureKind.STREAM_STALLED


def test_a_failing_sample_ends_the_job(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, FAILING_TOKEN]}])
    with pytest.raises(FailureError, match=r"sample 0 .*--on-error skip"):
        run(model, data, str(tmp_path / "rows.sock"), on_error="fail")


def test_options_that_contradict_it(model: Path, tmp_path: Path) -> None:
    for name, value in {"output": "x", "format": "files", "append": True, "world_size": 2}.items():
        with pytest.raises(ValueError, match=f"{name}=.*with stream nothing is stored"):
            ExtractOptions(input=["a"], layers="0", stream="s", **{name: value})
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2]}])
    options = ExtractOptions(input=[str(data)], layers="0", stream=str(tmp_path / "s"))
    with pytest.raises(ValueError, match="data_parallel_size: has to be 1 with stream"):
        run_job(options, EngineArgs(model=str(model), data_parallel_size=2))
