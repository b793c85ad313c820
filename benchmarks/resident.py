"""Resident memory of an engine, and how fast it decodes one request.

    python benchmarks/resident.py FOLDER [--quantization int4] [--head-quantization int8]

prints, in GiB, what /proc/self/status says after the import, after loading and after decoding (all
of it, what is anonymous, what is files', and the most there was), and milliseconds a token by the
clock and by the CPU time of all threads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

FIELDS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


def show_memory(when: str) -> None:
    """Print a line of this process's sizes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    shown = (f"{name} {int(sizes[name].split()[0]) / 2**20:.3f}" for name in FIELDS)
    print(f"{when:10}", *shown, flush=True)


def main() -> None:
    """Load, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization")
    parser.add_argument("--head-quantization")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    show_memory("imported")
    options: dict[str, Any] = {
        "quantization": args.quantization,
        "head_quantization": args.head_quantization,
    }
    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        max_model_len=args.steps + 32,
        max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )
    show_memory("loaded")
    sampling = SamplingParams(
        max_tokens=args.steps, temperature=0.0, ignore_eos=True, detokenize=False
    )
    for _ in range(args.rounds):
        clock, cpu = time.perf_counter(), time.process_time()
        llm.generate([list(range(8, 24))], sampling, use_tqdm=False)
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        print(f"{1e3 * clock / args.steps:.1f} ms a token, CPU {1e3 * cpu / args.steps:.1f}")
    show_memory("decoded")


if __name__ == "__main__":
    main()
