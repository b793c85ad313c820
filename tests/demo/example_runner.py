"""Runs a script of the examples folder in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str | Path) -> str:
    """What the script prints; the test fails when the script does."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
