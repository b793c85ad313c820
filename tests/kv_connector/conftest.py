from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv_connector.connector_harness import Harness, MakeHarness
from vllm.config import KVTransferConfig


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "hidden" / "states"


@pytest.fixture
def make_harness(storage: Path) -> Iterator[MakeHarness]:
    """Harnesses whose files go to ``storage``; their threads end with the test."""
    made: list[Harness] = []

    def make(
        connector: str = "ExampleHiddenStatesConnector",
        module_path: str | None = None,
        options: dict[str, Any] | None = None,
        role: Any = "kv_producer",
        **shape: Any,
    ) -> Harness:
        config = KVTransferConfig(
            kv_connector=connector,
            kv_role=role,
            kv_connector_module_path=module_path,
            kv_connector_extra_config={"shared_storage_path": str(storage), **(options or {})},
        )
        made.append(Harness(config, **shape))
        return made[-1]

    yield make
    for harness in made:
        harness.worker.shutdown()
        harness.scheduler.shutdown()
