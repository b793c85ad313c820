"""speculators 0.9 reads the ``speculators`` format with its own dataset class.

It needs versions of other packages that this project does not, so it is asked in a Python of its
own: SPECULATORS_PYTHON names one that has it, or is ``install`` to make one for the test
(minutes, and a package index).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hidden_states.sample_data import make_samples, make_settings
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.manifest import merge_units, start_dataset
from vllm.hidden_states.units import open_unit_writer

_READER = Path(__file__).with_name("speculators_reader.py")
_VERSION = "0.9.0"
_NEEDS = [
    "torch", "transformers>=5,<=5.19", "datasets>=4,<=5.1", "openai", "httpx", "aiohttp", "psutil",
    "loguru<=0.7.3", "pydantic-settings", "rich", "typer", "protobuf",
]  # fmt: skip


@pytest.fixture(scope="session")
def speculators_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    chosen = os.environ.get("SPECULATORS_PYTHON", "")
    if chosen == "install":
        folder = tmp_path_factory.mktemp("speculators")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        chosen = str(folder / "bin" / "python")
        pip = [chosen, "-m", "pip", "install", "-q"]
        packages = [f"speculators=={_VERSION}", f"hs-connectors=={_VERSION}"]
        subprocess.run([*pip, "--no-deps", *packages], check=True)
        subprocess.run([*pip, *_NEEDS], check=True)
    if not chosen and importlib.util.find_spec("speculators") is not None:
        chosen = sys.executable
    if not chosen:
        pytest.skip("speculators is not here: SPECULATORS_PYTHON=python that has it, or =install")
    return chosen


@pytest.mark.parametrize("route", ["written", "converted"])
def test_its_own_dataset_class_reads_it(
    tmp_path: Path, speculators_python: str, route: str
) -> None:
    samples = make_samples([5, 9, 2, 7])
    records = [0, 2, 3, 4]  # record 1 could not be tokenised
    fmt = "speculators" if route == "written" else "sharded"
    settings = make_settings(samples, fmt, shard_bytes=10**6)
    folder = tmp_path / fmt
    start_dataset(str(folder), settings)
    with open_unit_writer(str(folder), 0, settings) as writer:
        for sample, record in zip(samples, records, strict=True):
            writer.append(sample, sample.index, record)
        writer.commit()
    merge_units(str(folder))
    if route == "converted":
        folder = tmp_path / "speculators"
        convert_dataset(str(tmp_path / "sharded"), str(folder), "speculators")
    expected: list[dict[str, torch.Tensor] | None] = [None] * 5
    for sample, record in zip(samples, records, strict=True):
        expected[record] = {"token_ids": sample.token_ids, "hidden_states": sample.hidden_states}
    torch.save(expected, tmp_path / "expected.pt")
    done = subprocess.run(
        [speculators_python, _READER, tmp_path / "prepared", folder, tmp_path / "expected.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("read 4 samples\n")
