"""The examples run as they stand, on the demo's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_runner import run_example


def test_extract_then_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = tmp_path / "hidden_states"
    extracted = run_example(
        "extract_offline.py", "--cache-dir", cache, "--storage", storage, "--layers", "8", "0", "3"
    )
    shapes = re.findall(r"hidden_states \((\d+), 3, 256\)", extracted)
    assert len(shapes) == 4
    assert int(shapes[3]) == int(shapes[0]) + 7, "8 tokens generated, the last has no row"

    files = sorted(storage.glob("*.safetensors"))
    assert len(files) == 4
    described = run_example("read_hidden_states.py", *files)
    assert described.count("3 layers, hidden size 256") == 4
    assert not list(storage.glob("*.lock")), "the reader owns the files and removed the locks"

    monkeypatch.chdir(tmp_path)
    assert run_example("read_hidden_states.py") == described.replace(f"{tmp_path}/", "")


def test_custom_connector(cache: Path) -> None:
    printed = run_example("custom_connector.py", "--cache-dir", cache)
    cosines = [float(value) for value in re.findall(r"cosine (-?\d\.\d+)", printed)]
    assert len(cosines) == 2
    assert all(-1.0 <= value <= 1.0 for value in cosines)


def test_a_probe_on_tensors(cache: Path) -> None:
    printed = run_example("extract_tensors.py", "--cache-dir", cache, "--layers", "0", "8")
    accuracies = [int(value) for value in re.findall(r"layer \d: (\d+)%", printed)]
    assert len(accuracies) == 2
    assert accuracies[0] == 50 < 90 <= accuracies[1]


def test_prefixes_outlive_the_pool_and_the_engine(cache: Path) -> None:
    printed = run_example("keep_prefixes.py", "--cache-dir", cache)
    found = [int(n) for n in re.findall(r": (\d+) tokens", printed)]
    assert printed.count("the same rows: True") == 4, printed
    assert len(found) == 4
    assert min(found) >= 150, printed
