"""Host memory of an extraction does not grow with the prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.control_group import control_group, inside, num_killed
from tests.engine.harness import extraction_config
from tests.grids import at_night

Checkpoint = Callable[..., Path]
NUM_TOKENS = 32768
MOST_EXTRA_MIB = 192
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
# Rows of 3 layers x 1,024 float32 values: 12 KiB a token, 384 MiB a prompt.
LAYERS = [0, 1, 2]
WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "max_position_embeddings": NUM_TOKENS + 64,
}

CHILD = """
import ctypes, json, sys
from vllm import LLM, SamplingParams

def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

options = json.loads(sys.argv[1])
num_tokens = options.pop("num_tokens")
llm = LLM(**options)
# Tensors are mapped and unmapped from here on: how much freed memory the C library keeps in
# pieces of its heap differs by 200 MiB from one run to the next.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 1 << 20)
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
ctypes.CDLL(None).mallopt(M_MMAP_MAX, 1 << 16)
params = SamplingParams(max_tokens=1, temperature=0.0)
llm.generate([[7, 8, 9]], params, use_tqdm=False)
started = peak_bytes()
prompt = [i * i % 299 for i in range(num_tokens)]
(output,) = llm.generate([prompt], params, use_tqdm=False)
print(json.dumps({
    "started": started,
    "peak": peak_bytes(),
    "path": (output.kv_transfer_params or {}).get("hidden_states_path"),
}))
"""


def measure(folder: Path, **options: Any) -> dict[str, Any]:
    """Peak resident bytes of a process of its own that generates once."""
    options = {
        "model": str(folder),
        "max_model_len": NUM_TOKENS + 64,
        "kv_cache_memory_bytes": 2**30,
        "num_tokens": NUM_TOKENS,
        **options,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return values


@pytest.mark.parametrize(
    ("family", "caching"),
    [
        ("qwen3_5", True),  # attention and recurrent layers
        at_night("qwen3_5", False),
        at_night("llama", True),
        at_night("llama", False),
    ],
)
def test_a_long_extraction_stays_in_bounds(
    family: str, caching: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **WIDE, **SIZES[family])
    plain = measure(folder, enable_prefix_caching=caching)
    config = extraction_config(LAYERS, tmp_path)
    extracted = measure(folder, enable_prefix_caching=caching, **config)
    assert os.path.getsize(extracted["path"]) > NUM_TOKENS * 12 * 1024
    extra = (extracted["peak"] - plain["peak"]) / 2**20
    assert extra <= MOST_EXTRA_MIB, f"{extra:.0f} MiB more than without extraction"


LIMITED = """
import json, resource, sys
import torch
from vllm import LLM

options = json.loads(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
llm = LLM(**options)
samples = list(llm.extract([[1, 2, 3] * 40] * 20, ":"))
print(sum(sample.hidden_states.shape[0] for sample in samples))
"""


def limited(checkpoint: Checkpoint, **options: Any) -> subprocess.CompletedProcess[str]:
    """An engine in a process that may take a GiB of addresses more than its libraries."""
    options = {"model": str(checkpoint("qwen3_5")), **options}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_limit_of_the_address_space(checkpoint: Checkpoint) -> None:
    """The pool is cut to what is left of it; one that is asked for is refused by name."""
    found = limited(checkpoint)
    assert found.stdout.split() == ["2400"], found.stderr
    found = limited(checkpoint, kv_cache_memory_bytes=4 << 30)
    assert "ValueError: a KV pool of 4.00 GiB cannot be allocated" in found.stderr
    assert "lower kv_cache_memory_bytes, or raise the limit (ulimit -v" in found.stderr


IN_A_GROUP = """
import json, sys
from vllm import LLM

with LLM(**json.loads(sys.argv[1])) as llm:
    samples = list(llm.extract([[1, 2, 3] * 40] * 20, ":"))
    print(sum(sample.hidden_states.shape[0] for sample in samples))
"""


def test_a_limit_of_the_control_group(checkpoint: Checkpoint) -> None:
    """As with addresses: the pool is a share of what there is, and too large a one is refused."""
    with control_group(1 << 30) as group:

        def run(**options: Any) -> subprocess.CompletedProcess[str]:
            settings = json.dumps({"model": str(checkpoint("qwen3_5")), **options})
            command = inside(group, ["-c", IN_A_GROUP, settings])
            return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

        found = run()
        assert found.stdout.split() == ["2400"], found.stderr
        found = run(kv_cache_memory_bytes=4 << 30)
        assert "ValueError: a KV pool of 4.00 GiB cannot be allocated" in found.stderr
        assert num_killed(group) == 0


ATTACKS = (
    "tests/engine/test_attack.py::test_random_calls_from_threads[qwen3_5-6]",
    "tests/entrypoints/test_server_attack.py::test_mixed_requests_at_once[qwen3_5-12]",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_in_a_control_group(attack: str) -> None:
    """The same in little memory: the process of the test, too, has to do with it."""
    with control_group(5 << 28) as group:
        arguments = ["-m", "pytest", "-m", "", "-p", "no:cacheprovider", attack]
        command = inside(group, arguments)
        found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert found.returncode == 0, found.stdout
        assert "1 passed" in found.stdout
        assert num_killed(group) == 0
