"""Each capability stays within the lines that docs/design.md allows it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLACK = 0.05
"""A budget this much larger than what is there says nothing any more: lower it."""


def budgets() -> dict[str, tuple[list[str], int]]:
    """Capability -> (its packages and modules, most lines), from the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("## 12. Lines of code")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ((?:`[^`]+` ?)+) \| ([\d,]+) \|$", section, re.MULTILINE)
    return {
        name.strip(): (re.findall(r"`([^`]+)`", modules), int(most.replace(",", "")))
        for name, modules, most in rows
    }


def lines_by_capability() -> dict[str, int]:
    """Count the lines of vllm; a module counts for the row with the longest name before it."""
    owner = {name: row for row, (names, _) in budgets().items() for name in names}
    count = dict.fromkeys(budgets(), 0)
    for path in (ROOT / "vllm").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "vllm").with_suffix("").parts)
        names = [name for name in owner if f"{module}.".startswith(f"{name}.")]
        assert names, f"no row of the table in docs/design.md, section 12, has vllm.{module}"
        count[owner[max(names, key=len)]] += len(path.read_text(encoding="utf-8").splitlines())
    return count


def test_no_capability_exceeds_its_budget() -> None:
    count, over, slack = lines_by_capability(), [], []
    for name, (_, most) in budgets().items():
        if count[name] > most:
            over.append(f"{name}: {count[name]} lines, {most} allowed")
        elif count[name] < most * (1 - SLACK) - 50:
            slack.append(f"{name}: {count[name]} lines, {most} allowed")
    assert not over, f"simplify, or say in docs/design.md why more is needed: {over}"
    assert not slack, f"lower these budgets in docs/design.md: {slack}"


def test_every_name_in_the_table_exists() -> None:
    for names, _ in budgets().values():
        for name in names:
            path = ROOT / "vllm" / Path(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), name
