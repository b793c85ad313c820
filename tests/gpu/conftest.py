"""Engines on a card: tiny checkpoints, small pools, few sizes of recorded batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(family)``: the folder of a tiny float32 checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = make_checkpoint(folder, family)
        return made[family]

    return make


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says a figure where whoever runs the tests sees it."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}", end="", flush=True)

    return say


@pytest.fixture(autouse=True)
def _sync_debug_mode_put_back() -> Any:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
