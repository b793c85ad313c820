"""docs/tests.md says where the tests of each module are, and what each test file tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "tests.md").read_text(encoding="utf-8")


class Row(NamedTuple):
    modules: list[str]
    tests: list[str]


def rows() -> list[Row]:
    found = re.findall(r"^\| (`.*?) \|.*\| (.*?) \|$", PAGE, re.MULTILINE)
    return [Row(re.findall("`(.+?)`", one), re.findall("`(.+?)`", other)) for one, other in found]


def files_of(pattern: str) -> list[Path]:
    folder = ROOT / "tests"
    return [path for path in folder.glob(f"{pattern}.py") if path.name.startswith("test_")]


def test_every_module_has_a_row() -> None:
    prefixes = [module for row in rows() for module in row.modules]
    assert len(prefixes) == len(set(prefixes)) > 40
    modules = {
        path.relative_to(ROOT / "vllm").with_suffix("").as_posix()
        for path in (ROOT / "vllm").rglob("*.py")
    }
    without = [one for one in modules if not any(f"{one}/".startswith(f"{p}/") for p in prefixes)]
    assert not without, f"docs/tests.md does not say where these are tested: {sorted(without)}"
    packages = {one.rpartition("/")[0] for one in modules}
    gone = [one for one in prefixes if one not in modules | packages]
    assert not gone, f"docs/tests.md names modules that are not there: {gone}"


def test_every_test_file_is_in_a_row() -> None:
    patterns = [pattern for row in rows() for pattern in row.tests]
    gone = [pattern for pattern in patterns if not files_of(pattern)]
    assert not gone, f"docs/tests.md names tests that are not there: {gone}"
    patterns += re.findall(r"`([\w/*]+)`", PAGE.partition("Not about one package")[2])
    named = {path for pattern in patterns for path in files_of(pattern)}
    every = set((ROOT / "tests").rglob("test_*.py"))
    clients = ROOT / "tests" / "integration" / "clients"
    without = [path for path in every - named if clients not in path.parents]
    assert not without, f"docs/tests.md does not say what these test: {sorted(without)}"
