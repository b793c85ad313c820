"""From ``LLM(...)`` to the first result in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.harness import extraction_config

MOST_SECONDS = 5.0
ATTEMPTS = 3
"""The machine may be busy with something else: the best attempt counts, and time spent
waiting for a core does not (Linux counts it)."""

CHILD = """
import json, sys, time

import vllm

def now():
    try:
        with open("/proc/self/schedstat") as file:
            waited_ns = int(file.read().split()[1])
    except OSError:
        waited_ns = 0
    return time.perf_counter() - waited_ns / 1e9


folder, config = sys.argv[1], json.loads(sys.argv[2])
start = now()
llm = vllm.LLM(folder, kv_cache_memory_bytes=2**24, **config)
(output,) = llm.generate("hello", vllm.SamplingParams(max_tokens=1), use_tqdm=False)
print(now() - start)
assert output.kv_transfer_params["hidden_states_path"]
"""


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_first_result(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    arguments = [str(checkpoint(family)), json.dumps(extraction_config([1], tmp_path))]
    root = str(Path(__file__).parents[2])
    seconds = []
    for _ in range(ATTEMPTS):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, *arguments],
            env={**os.environ, "PYTHONPATH": root, "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(float(child.stdout))
        if seconds[-1] < MOST_SECONDS:
            break
    assert min(seconds) < MOST_SECONDS
