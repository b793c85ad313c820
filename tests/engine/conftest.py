from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(family, dtype=..., **config)``: the folder of a tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(family: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        key = repr((family, dtype, sorted(config.items(), key=str)))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(folder, family, dtype=dtype, **config)
        return made[key]

    return make
