from __future__ import annotations

import os

import pytest

from tests.integration.clients.environment import ClientEnvironment, prepare

# They install packages from a registry, which no other test may need: `make test-clients`.
collect_ignore_glob = [] if os.environ.get("TEST_CLIENTS") else ["test_*.py"]


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> ClientEnvironment:
    prepare()
    return ClientEnvironment(tmp_path_factory.mktemp("home"))
