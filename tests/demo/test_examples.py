"""The examples run as they stand, on the demo's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_runner import EXAMPLES, run_example

from tests.grids import at_night


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


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("train_probe", 60),
        at_night("train_eagle_head", 16),
        at_night("train_sae", 24),
        at_night("distill", 50),
    ],
)
def test_training(name: str, steps: int, cache: Path, tmp_path: Path) -> None:
    printed = train(name, steps, cache, tmp_path / "loss.png")
    first, last = first_and_last(printed)
    assert last < 0.9 * first, printed
    if name == "train_probe":
        accuracies = [int(value) for value in re.findall(r"layer \d: (\d+)%", printed)]
        assert len(accuracies) == 9
        assert accuracies[0] < 25 < 40 < max(accuracies), "one of 8 by chance"


def test_a_learnt_steering_vector(cache: Path, tmp_path: Path) -> None:
    printed = train("steer", 12, cache, tmp_path / "loss.png")
    first, last = first_and_last(printed)
    assert last < 0.95 * first, printed
    trained = float(re.findall(r"with the vector: loss (\d+\.\d+)", printed)[0])
    losses = [float(value) for value in re.findall(r"of the vector: loss (\d+\.\d+)", printed)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] == pytest.approx(trained, abs=2e-4), "the engine adds it as transformers does"


def train(name: str, steps: int, cache: Path, plot: Path) -> str:
    """Run a training example; returns what it prints."""
    pytest.importorskip("matplotlib")
    arguments = ("--steps", str(steps), "--cache-dir", cache, "--plot", plot)
    printed = run_example(f"{name}.py", *arguments)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80
    return printed


def first_and_last(printed: str) -> tuple[float, float]:
    """Return the mean loss of the first and of the last steps."""
    ((first, last),) = re.findall(r"loss from (\d+\.\d+) to (\d+\.\d+)", printed)
    return float(first), float(last)
