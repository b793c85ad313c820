"""SpecForge's online client against this server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.clients.environment import ClientEnvironment
from tests.models.checkpoints import make_checkpoint


def test_its_adapter_and_its_store(clients: ClientEnvironment, tmp_path: Path) -> None:
    """Every value is as in transformers, and the trainer's store can remove all objects."""
    model = make_checkpoint(tmp_path / "model", "qwen3_5")
    program = Path(__file__).with_name("specforge_online.py")
    printed = clients.run_beside(program, str(model), str(tmp_path / "work"))
    assert json.loads(printed.splitlines()[-1]) == []
