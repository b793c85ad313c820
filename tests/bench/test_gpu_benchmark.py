"""``benchmarks/gpu.py`` with tiny shapes on the CPU: every row is measured, whatever it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu

TINY = ["--tiny", "--device", "cpu", "--rounds", "3"]


def test_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "rows.json"
    assert gpu.main([*TINY, "--storage", str(tmp_path), "--json", str(document)]) == 0
    rows = json.loads(document.read_text())["rows"]
    assert {row["name"].lower().split("-")[-1] for row in rows} >= {"0.8b", "9b", "8b"}
    assert {row["name"] for row in rows} >= {"8k", "131k", "decode", "cuts", "exactness"}
    for row in rows:
        if row["name"] in ("cuts", "exactness") or "of the pool" in row["work"]:
            assert row["is_met"], row
    table = capsys.readouterr().out
    assert all(row["work"] in table for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_row_that_fails_is_told_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench: gpu.Bench) -> None:
        raise RuntimeError("no room")

    monkeypatch.setitem(gpu.ROWS, "9b", fail)  # type: ignore[misc]
    assert gpu.main([*TINY, "--storage", str(tmp_path), "--only", "9b", "cuts"]) == 1
    table = capsys.readouterr().out
    assert "9b: FAILED" in table
    assert "no room" in table
    assert table.count("identical") == 4


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--rounds", "0"])
    assert "--rounds 0: use at least 1" in capsys.readouterr().err
