from __future__ import annotations

from pathlib import Path

import pytest

from tests.hidden_states.sample_data import make_samples, write_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Seven samples in several shards."""
    return write_dataset(tmp_path / "dataset", make_samples([5, 1, 9, 12, 3, 7, 2]))
