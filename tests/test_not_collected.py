"""Tests that only another machine can run leave one line in the log, and no skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import at_night

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.not_collected import NotCollected

def pytest_configure(config):
    config.pluginmanager.register(NotCollected())
"""
TESTS = """
import pytest

ISAS = [pytest.param(x, marks=pytest.mark.isa(x)) for x in ("mmx9", "baseline")]

@pytest.mark.parametrize("isa", ISAS)
def test_isa(isa):
    assert isa == "baseline"

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_card(n):
    raise AssertionError

@pytest.mark.exhaustive
@pytest.mark.gpu
def test_at_night():
    raise AssertionError
"""


@pytest.mark.parametrize("workers", ["0", at_night("2")])
def test_they_are_counted_in_one_line(workers: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", workers, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "not collected on this machine: 3 need a GPU, 1 need mmx9\n" in done.stdout, done.stdout
    assert "1 passed" in done.stdout and "skipped" not in done.stdout
