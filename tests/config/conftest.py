"""Checkpoint folders that hold a config and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_checkpoints import HYBRID, LATENT, LLAMA, MIXED, MakeCheckpoint


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Writes ``base`` with ``changes`` (None: no such key) as a config.json; returns its folder."""

    def make(base: dict[str, Any], **changes: Any) -> str:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        content = {k: v for k, v in {**base, **changes}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(content))
        return str(folder)

    return make


@pytest.fixture
def llama(make_checkpoint: MakeCheckpoint) -> str:
    return make_checkpoint(LLAMA)


@pytest.fixture
def hybrid(make_checkpoint: MakeCheckpoint) -> str:
    return make_checkpoint(HYBRID)


@pytest.fixture
def mixed(make_checkpoint: MakeCheckpoint) -> str:
    return make_checkpoint(MIXED)


@pytest.fixture
def latent(make_checkpoint: MakeCheckpoint) -> str:
    return make_checkpoint(LATENT)
