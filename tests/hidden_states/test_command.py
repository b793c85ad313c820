"""``vllm hidden-states inspect | verify | convert``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hidden_states.sample_data import make_samples, write_dataset
from vllm.entrypoints.cli.main import main
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.plots import draw_cosines, draw_lengths, draw_norms
from vllm.hidden_states.row_statistics import measure_rows

PNG = b"\x89PNG\r\n"


def run(*arguments: str) -> int:
    return main(["hidden-states", *arguments])


def test_verify(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", str(dataset)) == 0
    assert capsys.readouterr().out == f"{dataset}: no problems\n"
    os.truncate(dataset / "shard-00000.safetensors", 50)
    (dataset / "shard-00002.safetensors").unlink()
    assert run("verify", str(dataset)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "shard-00000.safetensors: 50 bytes instead of" in lines[0]
    assert lines[1].endswith("shard-00002.safetensors: the file is missing")
    assert lines[2] == f"{dataset}: 2 problems"
    with pytest.raises(SystemExit, match=r"^2$"):  # the folder above, for instance
        run("verify", str(dataset.parent))
    captured = capsys.readouterr()
    assert "there is no dataset and no *.safetensors file" in captured.err and not captured.out


def test_convert(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "files"
    assert run("convert", str(dataset), str(target), "--format", "files", "--dtype", "float32") == 0
    assert "7 samples, 39 rows" in capsys.readouterr().out
    for read, written in zip(
        HiddenStatesDataset(target), HiddenStatesDataset(dataset), strict=True
    ):
        assert torch.equal(read.hidden_states, written.hidden_states.float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "/no/such"], "there is no such folder"),
        (["convert", "SRC", "SRC", "--format", "files"], "use a different folder from SRC"),
        (["convert", "SRC", "b", "--format", "files", "--shard-size", "0"], "--shard-size 0.0"),
        (["convert", "SRC", "b", "--format", "files", "--shard-size", "inf"], "--shard-size inf"),
        (["convert", "SRC", "b", "--format", "zip"], "invalid choice: 'zip'"),
        (["inspect", "SRC", "--samples", "0"], "--samples 0: use at least 1"),
        (
            ["inspect", "SRC", "--no-plots", "--label", "a"],
            "--label a: not together with",
        ),
        (["inspect", "SRC", "--tokenizer", "/no/such"], "--tokenizer /no/such: it needs --html"),
        (["verify", "SRC", "--samples", "3"], "--samples: it needs --against transformers MODEL"),
        (["verify", "SRC", "--seed", "1"], "--seed: it needs --against"),
        (["verify", "SRC", "--revision", "x"], "--revision: it needs --against"),
        (["verify", "SRC", "--trust-remote-code"], "--trust-remote-code: it needs --against"),
        (["verify", "--against", "sglang", "m", "SRC"], "--against sglang: use --against transf"),
        (["verify", "--against", "transformers", "m", "SRC", "--samples", "0"], "--samples 0: use"),
        (["verify", "--against", "transformers", "/no/such", "SRC"], "/no/such"),
        (["look"], "invalid choice: 'look'"),
    ],
)
def test_bad_arguments(
    dataset: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*(str(dataset) if argument == "SRC" else argument for argument in arguments))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_dataset(tmp_path / "d", make_samples([5, 30, 11], torch.float32), dtype="fp8")
    assert run("inspect", str(path), "--no-plots") == 0
    lines = capsys.readouterr().out.splitlines()
    entries = {line[:20].strip(): line[20:] for line in lines}
    assert entries["model"] == "tiny"
    assert entries["layer ids"] == "[0, 3, 8]"
    assert (entries["samples"], entries["tokens"], entries["rows"]) == ("3", "46", "46")
    assert entries["tokens per sample"] == "5 to 30, median 11"
    assert entries["dtype"] == "fp8"
    dataset = HiddenStatesDataset(path)
    assert dataset.manifest is not None
    norm, error = entries["8"].split()
    assert float(norm) == pytest.approx(dataset.manifest["totals"]["row_norms"][2], rel=1e-5)
    assert error.endswith("%")


def test_plots(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "plots"
    assert run("inspect", str(dataset), "--output", str(output)) == 0
    names = ["layer_cosines.png", "lengths.png", "pca.png", "row_norms.png", "token_norms.png"]
    assert sorted(os.listdir(output)) == names
    printed = capsys.readouterr().out
    for name in names:
        assert (output / name).read_bytes().startswith(PNG)
        assert f"{output / name}\n" in printed
    assert list(dataset.glob("*.png")) == []


def test_without_matplotlib(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("inspect", str(dataset)) == 0
    printed = capsys.readouterr().out
    assert "row norm" in printed and "plots               left out" in printed
    assert "pip install matplotlib" in printed
    assert not dataset.with_name(f"{dataset.name}-plots").exists()
    with pytest.raises(SystemExit) as ended:
        run("inspect", str(dataset), "--html", "report.html")
    assert ended.value.code == 2
    assert "--html: it needs matplotlib: pip install" in capsys.readouterr().err


def test_plots_lie_next_to_the_dataset(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name in (f"{dataset}/", "."):
        monkeypatch.chdir(dataset)
        assert run("inspect", name) == 0
        plots = dataset.with_name(f"{dataset.name}-plots")
        assert len(list(plots.iterdir())) == 5
        shutil.rmtree(plots)


@pytest.mark.parametrize("lengths", [[31], [3, 3, 4, 7], [1, 50], [1, 51], [5, 1000, 1001, 77]])
def test_bars_of_lengths_stand_on_whole_numbers(lengths: list[int], dataset: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    _, axes = pyplot.subplots()
    draw_lengths(axes, lengths)
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert sum(bar.get_height() for bar in axes.patches) == len(lengths)
    assert len(axes.patches) <= 50
    for bar in bars:
        inside = [n for n in lengths if 0 < n - bar.get_x() < bar.get_width()]
        assert len(inside) == bar.get_height(), "no length lies on an edge"
    if len(axes.patches) == max(lengths) - min(lengths) + 1:
        assert {bar.get_x() + bar.get_width() / 2 for bar in bars} == set(lengths)
    statistics = measure_rows(HiddenStatesDataset(dataset), 2)
    for draw in (draw_norms, draw_cosines):
        _, axes = pyplot.subplots()
        draw(axes, statistics, ["0", "1", "2"])
        assert axes.get_xlabel() == "layer id" and axes.get_ylabel()
    pyplot.close("all")


def test_statistics_of_rows(tmp_path: Path) -> None:
    samples = make_samples([5, 3, 4])
    for sample in samples:
        sample.hidden_states[:, 1] = -sample.hidden_states[:, 0]
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", samples))
    statistics = measure_rows(dataset, 10)
    rows = torch.cat([s.hidden_states for s in samples]).float()
    assert statistics.num_samples == 3
    assert torch.allclose(statistics.norms, rows.norm(dim=-1))
    assert torch.allclose(statistics.cosines.diagonal(), torch.ones(3), atol=1e-5)
    assert statistics.cosines[0, 1] == pytest.approx(-1, abs=1e-5)
    expected = torch.cosine_similarity(rows[:, 0], rows[:, 2], dim=-1).mean()
    assert statistics.cosines[0, 2] == pytest.approx(float(expected), abs=1e-5)
    assert measure_rows(dataset, 2).num_samples == 2


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, vllm.hidden_states; from vllm.entrypoints.cli.hidden_states import "
        "build_hidden_states_parser as b; b().format_help(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
