"""Jobs of ``vllm extract`` on a fake engine, and folders compared byte for byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.extract.fake_engine import FAILING_TOKEN, fake_rows, load_fake
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.manifest import merge_units, start_dataset
from vllm.hidden_states.metadata import DatasetSettings, read_unit_records
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import open_unit_writer

HIDDEN_SIZE = 72
LAYERS = (0, 3, 4)
UNIT_GIB = 2e-5
"""About 25 rows of three float32 layers."""


def token_lists(seed: int, count: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(290) for _ in range(rng.randrange(1, longest + 1))] for _ in range(count)
    ]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """A record that is a string is written as it is."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_token_ids(path: Path, lists: Sequence[Sequence[int]]) -> Path:
    return write_jsonl(path, [{"input_ids": list(one)} for one in lists])


def run(
    model: Path,
    data: Path,
    output: Path,
    data_parallel_size: int = 1,
    quantization: str | None = None,
    model_class_overrides: dict[str, str] | None = None,
    **options: Any,
) -> int:
    """The exit status of a job with the fake engine."""
    merged = {
        "input": [str(data)],
        "output": str(output),
        "layers": "0,3,last",
        "shard_size_gib": UNIT_GIB,
        **options,
    }
    engine_args = EngineArgs(
        model=str(model),
        data_parallel_size=data_parallel_size,
        quantization=quantization,
        model_class_overrides=model_class_overrides or {},
    )
    return run_job(ExtractOptions(**merged), engine_args, load_fake)  # type: ignore[arg-type]


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_rows(
    folder: Path, lists: Sequence[Sequence[int]], layers: Sequence[int] = LAYERS
) -> None:
    """The dataset has exactly these samples, and the rows of the fake engine."""
    dataset = HiddenStatesDataset(folder, verify="first_read")
    usable = [list(one) for one in lists if FAILING_TOKEN not in one]
    assert [sample.token_ids.tolist() for sample in dataset] == usable
    for sample in dataset:
        expected = fake_rows(sample.token_ids.tolist(), layers, HIDDEN_SIZE)[sample.positions]
        assert torch.equal(sample.rows(torch.float32), expected)


def rewrite(
    made: Path, folder: Path, change: Callable[[HiddenStatesSample], HiddenStatesSample]
) -> Path:
    """Write a sound dataset that has changed samples."""
    settings, dataset = DatasetSettings.read(str(made)), iter(HiddenStatesDataset(made))
    start_dataset(str(folder), settings)
    for unit in read_unit_records(str(made)):
        with open_unit_writer(str(folder), unit.unit, settings) as writer:
            for sample in itertools.islice(dataset, unit.num_samples):
                writer.append(change(sample), sample.index, sample.record or 0)
            writer.commit()
    merge_units(str(folder), [])
    return folder
