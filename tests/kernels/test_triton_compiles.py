"""The CUDA kernels compile for Hopper and fit its shared memory; no card is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_device import HAS_TRITON

SHARED_BYTES = 227 * 1024


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "VLLM_GDN_BACKEND": "TRITON",
    }
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    shared = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    assert {"_attention_kernel", "_combine_kernel", "_rms_norm_kernel"} <= shared.keys()
    for name, size in (line.rsplit(" ", 1) for line in result.stdout.splitlines()):
        assert int(size) <= SHARED_BYTES, f"{name} takes {size} bytes of shared memory"
