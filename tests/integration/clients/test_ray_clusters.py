"""Tests that need Ray, with Ray from the registry: clusters of two nodes on this machine.

About five minutes on two cores once the clients' environment is there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.clients.environment import RAY, ROOT, ClientEnvironment

SECONDS = 1200.0


@pytest.mark.timeout(SECONDS)
def test_engines_and_datasets(clients: ClientEnvironment) -> None:
    files = ("tests/engine/test_ray.py", "tests/extract/test_ray_workers.py")
    others = ("-k", "ray", "tests/extract/test_workers.py")
    for arguments in (files, others):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", "-rs", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(RAY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout
        assert "skipped" not in done.stdout, done.stdout
