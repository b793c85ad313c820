"""docs/performance.md and the table of README.md are made of the files in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, scheduler_alone, targets


def test_the_pages_are_those_of_the_results() -> None:
    runs = report.read_runs()
    page = report.performance_page(runs, report.TEMPLATE.read_text())
    assert report.PAGE.read_text() == page, "run: make performance-page"
    readme = report.README.read_text()
    assert readme == report.readme_with_table(readme, runs), "run: make performance-page"


def test_every_target_has_a_result_and_its_own_threshold() -> None:
    """A target that is changed, or renamed, needs a new measurement."""
    targeted = {
        (name, target.work, rival.name): f">= {rival.at_least:g}"
        for name, target in targets.TARGETS.items()
        for rival in target.rivals
    }
    rows = [row for run in report.read_runs() for row in run.rows]
    recorded = {
        (row["name"], row["work"], row["against"]): row["target"]
        for row in rows
        if row["name"] in targets.TARGETS
    }
    assert recorded == targeted
    assert targets.ALONE.keys() <= {row["name"] for row in rows}


def test_verdicts_follow_the_figures() -> None:
    for run in report.read_runs():
        for row in run.rows:
            sign, limit = row["target"].split()
            holds = {
                ">=": row["measured"] >= float(limit),
                ">": row["measured"] > float(limit),
                "<=": row["measured"] <= float(limit),
            }
            assert row["is_met"] == holds[sign], f"{run.name}: {row['work']}"


def test_what_targets_writes_is_a_results_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler_alone, "QUEUES", (50, 200, 400))
    monkeypatch.setattr(scheduler_alone, "POOLS", {"dense": (0, 30_000)})
    targets.main(["--only", "scheduler", "--rounds", "2", "--json", str(tmp_path / "here.json")])
    (run,) = report.read_runs(tmp_path)
    first, second = report.target_table([run]).splitlines()[2:]
    rate, growth = run.rows
    assert first.startswith("| here | scheduler | scheduler alone, dense, 200 queued | requests/s")
    for line, row in ((first, rate), (second, growth)):
        shown = report.figure(row["measured"])
        assert f"| {shown} |" in line or f"| **{shown}** (missed) |" in line
        assert line.endswith("| 2 |")
    described = report.run_table([run])
    assert "targets.py --only scheduler --rounds 2" in described
    assert run.content["machine"]["cpu"] in described
    assert run.content["date"] in described


def test_figures_are_shown_as_they_are() -> None:
    speed: dict[str, Any] = {
        "work": "w",
        "tokens_per_second": [760, 1234.4],
        "times_transformers": None,
        "share_of_products": 0.98765,
        "rounds": 2,
        "note": "quiet",
    }
    missed = {
        "name": "n",
        "work": "w",
        "against": "a",
        "target": ">= 1",
        "measured": 0.5,
        "is_met": False,
    }
    run = report.Run("r", {"rows": [missed], "speeds": [speed]})
    (line,) = report.speed_table([run]).splitlines()[2:]
    assert line == "| r | w | 760 to 1,234 | | 0.988 | 2; quiet |"
    (line,) = report.target_table([run]).splitlines()[2:]
    assert line == "| r | n | w | a | >= 1 | **0.5** (missed) | |"


def test_a_file_that_lacks_a_key_is_named(tmp_path: Path) -> None:
    content = {"machine": {}, "date": "", "commit": None, "conditions": "", "rows": [{"name": "n"}]}
    (tmp_path / "broken.json").write_text(json.dumps(content))
    message = r"broken\.json: against, command, is_met, measured, target, work is missing"
    with pytest.raises(ValueError, match=message):
        report.read_runs(tmp_path)
    with pytest.raises(ValueError, match="0 places for the table"):
        report.readme_with_table("no place", [])
