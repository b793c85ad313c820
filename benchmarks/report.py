"""Write docs/performance.md, and the table in README.md, from the files in benchmarks/results.

    python benchmarks/report.py

A results file is one run on one machine. ``benchmarks/targets.py --json FILE`` writes one:

    machine      {"cpu": ..., "threads": ...}
    date, commit when and at which commit it was recorded (commit: may be null)
    command      what measures these rows
    conditions   what else the figures depend on
    rows         targets: name, work, against, target, measured, is_met, rounds, note
    speeds       extraction: work, tokens_per_second, times_transformers, share_of_products, rounds,
                 note; a number, a range [least, most] or null each. "headline": in README.md too
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = ROOT / "benchmarks" / "performance_template.md"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"

_FIGURES = ("tokens_per_second", "times_transformers", "share_of_products")
_ROW_KEYS = {"name", "work", "against", "target", "measured", "is_met"}
_PLACE = re.compile(r"(<!-- made by benchmarks/report.py -->\n).*?(<!-- end -->)", re.DOTALL)


class Run(NamedTuple):
    """One results file."""

    name: str
    content: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.content.get("rows", ()))

    @property
    def speeds(self) -> list[dict[str, Any]]:
        return list(self.content.get("speeds", ()))


def read_runs(folder: Path = RESULTS) -> list[Run]:
    """The files of a folder, by name. Raises ValueError for a file that lacks a key."""
    runs = [Run(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    for run in runs:
        missing = {"machine", "date", "commit", "command", "conditions"} - run.content.keys()
        for row in run.rows:
            missing |= _ROW_KEYS - row.keys()
        for speed in run.speeds:
            missing |= {"work", *_FIGURES} - speed.keys()
        if missing:
            raise ValueError(f"{run.name}.json: {', '.join(sorted(missing))} is missing")
    return runs


def performance_page(runs: Sequence[Run], template: str) -> str:
    """The template with a table in place of each ``{{name}}``."""
    tables = {
        "targets": target_table(runs),
        "speeds": speed_table(runs),
        "runs": run_table(runs),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: tables[found[1]], template)


def readme_with_table(text: str, runs: Sequence[Run]) -> str:
    """README.md with the headline rows in the place that is marked for them."""
    rows = [
        (speed["work"], *(figure(speed[name]) for name in _FIGURES))
        for run in runs
        for speed in run.speeds
        if speed.get("headline")
    ]
    heads = ("model, work", "tokens/s", "times transformers", "share of its matrix products")
    table = _table(heads, rows) + "\n"
    updated, count = _PLACE.subn(lambda found: found[1] + table + found[2], text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the table instead of 1")
    return updated


def target_table(runs: Iterable[Run]) -> str:
    rows = [
        (run.name, row["name"], row["work"], row["against"], row["target"], _verdict(row),
         _remarks(row))
        for run in runs
        for row in run.rows
    ]  # fmt: skip
    heads = ("run", "name", "work", "against", "target", "measured", "rounds, remarks")
    return _table(heads, rows)


def speed_table(runs: Iterable[Run]) -> str:
    rows = [
        (run.name, speed["work"], *(figure(speed[name]) for name in _FIGURES), _remarks(speed))
        for run in runs
        for speed in run.speeds
    ]
    heads = ("run", "model, work", "tokens/s", "times transformers", "share of its products",
        "rounds, remarks")  # fmt: skip
    return _table(heads, rows)


def run_table(runs: Iterable[Run]) -> str:
    return _table(("run", "machine", "recorded", "command", "conditions"), map(_describe, runs))


def _describe(run: Run) -> tuple[str, ...]:
    machine = run.content["machine"]
    commit = run.content["commit"]
    where = f"{machine['cpu']}, {machine['threads']} threads"
    when = run.content["date"] + (f", {commit}" if commit else "")
    return run.name, where, when, f"`{run.content['command']}`", run.content["conditions"]


def _verdict(row: dict[str, Any]) -> str:
    shown = figure(row["measured"])
    return shown if row["is_met"] else f"**{shown}** (missed)"


def _remarks(entry: dict[str, Any]) -> str:
    rounds = entry.get("rounds")
    return "; ".join(str(part) for part in (rounds, entry.get("note")) if part)


def figure(value: float | Sequence[float] | None) -> str:
    """A number to three decimals, a range, or nothing."""
    if value is None:
        return ""
    if isinstance(value, Sequence):
        return " to ".join(map(figure, value))
    return f"{value:,.0f}" if value >= 1000 else f"{round(value, 3):,}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(_lines(heads, rows))


def _lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|"


def main() -> None:
    runs = read_runs()
    PAGE.write_text(performance_page(runs, TEMPLATE.read_text()))
    README.write_text(readme_with_table(README.read_text(), runs))


if __name__ == "__main__":
    main()
