"""From ``LLM(...)`` to the first result in a fresh process: little beside the imports of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.harness import extraction_config

MOST_OF_LIBRARIES = 0.5
"""CPU time of a start over that of torch and transformers, measured in the same process. It is
about 0.15; a busy or slow machine holds up both."""

NOT_NEEDED = {"fastapi", "uvicorn", "zmq", "pyarrow", "ray", "matplotlib", "prometheus_client"}
"""Packages of the server, of datasets and of figures."""

CHILD = """
import json, sys, time

folders = sys.argv[2:]
started = time.process_time()
import torch, transformers
for folder in folders:
    transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder)
loaded = time.process_time()
known = set(sys.modules)
seconds, slept = [], []
time.sleep = slept.append
for folder in folders:
    before = time.process_time()
    from vllm import LLM, SamplingParams
    llm = LLM(folder, kv_cache_memory_bytes=2**24, **json.loads(sys.argv[1]))
    (output,) = llm.generate("hello", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.kv_transfer_params["hidden_states_path"]
    seconds.append(time.process_time() - before)
print(json.dumps({
    "of_libraries": loaded - started,
    "of_starts": seconds,
    "slept": slept,
    "packages": sorted({name.partition(".")[0] for name in set(sys.modules) - known}),
}))
"""


def test_first_result(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folders = [str(checkpoint(family)) for family in ("llama", "qwen3_5")]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(extraction_config([1], tmp_path)), *folders],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(child.stdout)
    assert max(found["of_starts"]) < MOST_OF_LIBRARIES * found["of_libraries"]
    assert found["slept"] == []
    assert not NOT_NEEDED & set(found["packages"])
