"""From the start of Python to the first row: a tiny checkpoint, and one of 1B in bfloat16."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.row import Row
from benchmarks.target_contenders import package_environment
from vllm.bench.linear_weights import load_linear_weights
from vllm.bench.models import find_model

MOST_SECONDS_TINY = 2.5
MOST_SECONDS_WARM = 2.0
MOST_TIMES_READING = 1.3
MOST_TIMES_WEIGHTS = 1.15
READ_BYTES = 16 * 2**20
POLL_SECONDS = 0.005
_PROGRAM = """
import sys
from vllm import LLM
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, max_model_len=64)
(sample,) = llm.extract([list(range(8, 24))], layers="last")
print(len(sample.hidden_states), flush=True)
"""


class Start(NamedTuple):
    """One start of Python with an engine."""

    seconds: float
    """Until the first rows are there."""
    peak_bytes: int
    """Most memory of its own, looked at every few milliseconds. Pages of mapped files, which the
    system takes back when others need memory, are not counted."""


def measure_start(rounds: int) -> Iterator[Row]:
    """Import, engine and first rows of a checkpoint that has next to no weights."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _make_tiny(Path(folder))
        starts = [start(checkpoint) for _ in range(rounds)]
    seconds = statistics.median(one.seconds for one in starts)
    yield Row("start", "tiny checkpoint, until its first rows", "s", f"<= {MOST_SECONDS_TINY}",
        seconds, rounds, {"rounds": [one._asdict() for one in starts]})  # fmt: skip


def measure_load(rounds: int, cache: Path, model: str = "llama-1b") -> Iterator[Row]:
    """The same of a large checkpoint: its files on the disk alone, then in the page cache.

    A virtual machine that gave free memory back to its host gets it again slowly, so the details
    say how long it takes to touch as much memory as the weights need, and nothing else.
    """
    checkpoint = find_model(model, cache).checkpoint
    files = sorted(checkpoint.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    start(checkpoint)
    reads, touches, cold, warm = [], [], [], []
    for _ in range(rounds):
        forget(files)
        reads.append(read(files))
        forget(files)
        cold.append(start(checkpoint))
        warm.append(start(checkpoint))
        touches.append(touch(num_bytes))
    times = statistics.median(c.seconds / r for c, r in zip(cold, reads, strict=True))
    details = {
        "reading": reads,
        f"touching {num_bytes} bytes": touches,
        "cold": [one._asdict() for one in cold],
        "warm": [one._asdict() for one in warm],
    }
    work = f"{model} in bfloat16, until its first rows"
    yield Row("load", f"{work}, files not in memory", "reading the files",
        f"<= {MOST_TIMES_READING}", times, rounds, details)  # fmt: skip
    yield Row("load", f"{work}, files in memory", "s", f"<= {MOST_SECONDS_WARM}",
        statistics.median(one.seconds for one in warm), rounds)  # fmt: skip
    tiny_peak = _peak_without_weights()
    weights = load_linear_weights(checkpoint)
    weight_bytes = weights.num_elements * weights.head.element_size()
    growth = statistics.median(one.peak_bytes - tiny_peak for one in warm)
    yield Row("load", f"{model}, memory of the process at its most", "weights",
        f"<= {MOST_TIMES_WEIGHTS}", growth / weight_bytes, rounds)  # fmt: skip


def start(checkpoint: Path) -> Start:
    """Start Python, load the checkpoint, extract 16 rows, end."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(checkpoint)],
        stdout=subprocess.PIPE,
        env=package_environment(),
        text=True,
    )
    assert process.stdout is not None
    peak = 0
    while not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
        peak = max(peak, _own_bytes(process.pid))
    seconds = time.perf_counter() - began
    printed, _ = process.communicate()
    if process.returncode or printed.split() != ["16"]:
        raise RuntimeError(f"an engine of {checkpoint} ended with {process.returncode}")
    return Start(seconds, peak)


def _own_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def forget(files: list[Path]) -> None:
    """Take files out of the page cache; the system may keep what others have mapped."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Return the seconds that reading all bytes takes."""
    buffer = bytearray(READ_BYTES)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def touch(num_bytes: int) -> float:
    """Return the seconds in which a process takes so much memory; it has ended then."""
    program = "import mmap, sys; memory = mmap.mmap(-1, int(sys.argv[1])); "
    program += (
        "memory.madvise(mmap.MADV_HUGEPAGE); memory[:: 4096] = bytes(-(-len(memory) // 4096))"
    )
    began = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", program, str(num_bytes)], check=True)
    return time.perf_counter() - began


def _peak_without_weights() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return start(_make_tiny(Path(folder))).peak_bytes


def _make_tiny(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
