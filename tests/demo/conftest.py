"""The examples folder as an import path, and one checkpoint for all tests here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the demo's checkpoint."""
    from demo_checkpoint import demo_checkpoint

    folder = tmp_path_factory.mktemp("cache")
    demo_checkpoint(folder)
    return folder
