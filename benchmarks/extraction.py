"""Speed of extraction: this engine, transformers, and the model's matrix products alone.

All contenders are measured in one run and in turn, round by round, on the same prompts; the
ratios are medians of the rounds' own ratios, so a machine that slows down or speeds up
meanwhile moves both sides. Every round has new random prompts: no prefix-cache hits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from benchmark_models import DEFAULT_CACHE, DEFAULT_LAYERS, VOCABULARY, checkpoint
from contender_process import ContenderProcess
from contenders import Kind, Prompts, Round, Workload

LABELS: dict[Kind, str] = {
    "extraction": "this engine",
    "plain": "this engine, no extraction",
    "transformers": "transformers",
    "bound": "bound",
}


@dataclass(frozen=True)
class Measurement:
    """One contender over all rounds."""

    kind: Kind
    seconds: list[float]
    tokens_per_second: float
    """Median."""
    bytes_written: int
    """In one round."""
    peak_memory_bytes: int
    note: str


@dataclass(frozen=True)
class ModelResult:
    """One model: measurements, and how many times faster the engine was than each other."""

    model: str
    layer_ids: tuple[int, ...]
    num_tokens: int
    measurements: list[Measurement]
    speed_ratios: dict[str, float]


def make_prompts(num_prompts: int, prompt_len: int, seed: int) -> Prompts:
    """Random token ids; the first few ids stand for special tokens and are left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (num_prompts, prompt_len), generator=generator)
    prompts: Prompts = ids.tolist()
    return prompts


def measure(model: str, workload: Workload, kinds: Sequence[Kind], rounds: int) -> ModelResult:
    """Load all contenders, warm them up, and run them in turn."""
    with ExitStack() as stack:
        processes = [stack.enter_context(ContenderProcess(kind, workload)) for kind in kinds]
        for process in processes:
            process.run(make_prompts(min(2, workload.num_prompts), workload.prompt_len, seed=0))
        results: dict[Kind, list[Round]] = {kind: [] for kind in kinds}
        for number in range(1, rounds + 1):
            prompts = make_prompts(workload.num_prompts, workload.prompt_len, seed=number)
            for process in processes:
                results[process.kind].append(process.run(prompts))
                print(
                    f"{model} round {number}/{rounds} {LABELS[process.kind]}: "
                    f"{results[process.kind][-1].seconds:.2f} s",
                    file=sys.stderr,
                )
        num_tokens = workload.num_prompts * workload.prompt_len
        measurements = [
            Measurement(
                kind=process.kind,
                seconds=[result.seconds for result in results[process.kind]],
                tokens_per_second=num_tokens
                / statistics.median(result.seconds for result in results[process.kind]),
                bytes_written=results[process.kind][-1].bytes_written,
                peak_memory_bytes=process.peak_bytes,
                note=process.note,
            )
            for process in processes
        ]
    return ModelResult(
        model, workload.layer_ids, num_tokens, measurements, _speed_ratios(measurements)
    )


def _speed_ratios(measurements: list[Measurement]) -> dict[str, float]:
    ours = next(m for m in measurements if m.kind == "extraction")
    return {
        other.kind: statistics.median(
            theirs / mine for theirs, mine in zip(other.seconds, ours.seconds, strict=True)
        )
        for other in measurements
        if other is not ours
    }


def report(result: ModelResult, prompt_len: int) -> None:
    """Print one model's table."""
    num_prompts = result.num_tokens // prompt_len
    layers = ", ".join(map(str, result.layer_ids))
    print(f"\n{result.model}: {num_prompts} prompts x {prompt_len} tokens, layers {layers}")
    print(f"{'':28}{'tokens/s':>10}{'seconds (min-max)':>22}{'peak MB':>9}{'ratio':>8}")
    for m in result.measurements:
        median = statistics.median(m.seconds)
        spread = f"{median:.2f} ({min(m.seconds):.2f}-{max(m.seconds):.2f})"
        ratio = result.speed_ratios.get(m.kind)
        print(
            f"{LABELS[m.kind]:28}{m.tokens_per_second:>10,.0f}{spread:>22}"
            f"{m.peak_memory_bytes / 1e6:>9,.0f}{'' if ratio is None else f'{ratio:.3f}':>8}"
            f"  {m.note}"
        )
    print("ratio: speed of this engine (extracting) over that of the row")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", choices=[*DEFAULT_LAYERS, "all"], default="all")
    add("--rounds", type=int, default=5)
    add("--prompts", type=int, default=16, help="prompts a round")
    add("--prompt-len", type=int, default=512, help="tokens a prompt")
    add("--layers", type=int, nargs="+", help="layer ids (default: four, the last among them)")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens a step, and the bound's")
    add("--no-transformers", action="store_true", help="leave transformers out")
    add("--plain", action="store_true", help="also the engine without extraction")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    add("--storage", type=Path, metavar="DIR", help="where hidden states are written")
    add("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoints")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.prompts, options.prompt_len) < 1:
        parser.error("--rounds, --prompts and --prompt-len must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    kinds: list[Kind] = ["extraction"]
    kinds += ["plain"] if options.plain else []
    kinds += [] if options.no_transformers else ["transformers"]
    kinds.append("bound")

    results = []
    for model in DEFAULT_LAYERS if options.model == "all" else [options.model]:
        workload = Workload(
            checkpoint=checkpoint(model, options.cache_dir),
            layer_ids=tuple(options.layers or DEFAULT_LAYERS[model]),
            num_prompts=options.prompts,
            prompt_len=options.prompt_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            storage_root=options.storage,
        )
        results.append(measure(model, workload, kinds, options.rounds))
        report(results[-1], options.prompt_len)
    if options.json is not None:
        machine = {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "vocabulary": VOCABULARY,
        }
        document = {"machine": machine, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
