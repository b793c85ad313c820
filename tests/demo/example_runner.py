"""Runs a script of the examples folder as ``python`` does, but here: its imports take seconds."""

from __future__ import annotations

import gc
import io
import os
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str | Path) -> str:
    """Return what the script prints; the test fails when the script does."""
    path, printed = str(EXAMPLES / name), io.StringIO()
    argv = [path, *map(str, arguments)]
    with mock.patch.dict(os.environ), mock.patch("sys.argv", argv), redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{printed.getvalue()}{end.code}")
    gc.collect()  # its engine
    return printed.getvalue()
