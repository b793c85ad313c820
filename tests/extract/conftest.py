from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
