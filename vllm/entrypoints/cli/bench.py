"""``vllm bench``: measure the engine on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    from vllm.benchmarks.contenders import Workload
    from vllm.benchmarks.models import BenchmarkModel

DEFAULT_MODEL = "qwen3.5-0.5b"


def build_bench_parser() -> argparse.ArgumentParser:
    """The parser of ``vllm bench``; importing it loads no torch."""
    parser = argparse.ArgumentParser(
        prog="vllm bench", description="Measure the engine on this machine."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    extraction = benchmarks.add_parser(
        "extraction",
        help="speed of extracting hidden states",
        description="Speed of extraction in tokens per second, its share of the bound (the "
        "model's matrix products alone, measured in the same run), and where the time goes. "
        "The contenders run in turn, each in a process of its own. Keep the machine otherwise "
        "idle.",
    )
    add = extraction.add_argument
    add("--model", nargs="+", default=[DEFAULT_MODEL], help="folders of checkpoints, or "
        "built-in shapes with random weights: qwen3.5-0.5b (the default), llama-1b")  # fmt: skip
    add(
        "--peer",
        choices=["none", "transformers"],
        default="none",
        help="measure this too (default: %(default)s)",
    )
    add("--plain", action="store_true", help="measure the engine without extraction too")
    add("--prompts", type=int, default=16, help="prompts of one round (default: %(default)s)")
    add("--prompt-len", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=1, help="tokens generated for each prompt; 0: none, "
        "and no layer above the deepest that is extracted (default: %(default)s)")  # fmt: skip
    add("--layers", type=int, nargs="+", help="layer ids (default: four, the last one of them)")
    add("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=Platform.default_max_num_batched_tokens,
        help="tokens of a step at most (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file too")
    add("--storage", type=Path, metavar="DIR", help="where hidden states are written "
        "(default: the system's temporary folder)")  # fmt: skip
    add("--cache-dir", type=Path, metavar="DIR", help="for built-in shapes "
        "(default: ~/.cache/vllm/benchmarks)")  # fmt: skip
    return parser


def bench(arguments: Sequence[str]) -> int:
    """Run ``vllm bench ARGUMENTS``; returns the exit status."""
    parser = build_bench_parser()
    args = parser.parse_args(arguments)
    try:
        run_extraction(args)
    except ValueError as error:
        parser.exit(2, f"vllm bench: {error}\n")
    return 0


def run_extraction(args: argparse.Namespace) -> None:
    """Measure model by model, print the tables, write the JSON file if one is asked for.

    Raises ValueError that names the option, the value and what would work.
    """
    _check(args)
    # For the processes of the contenders: their logs would bury the table.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.benchmarks.extraction import measure_extraction, table, write_json
    from vllm.benchmarks.models import DEFAULT_CACHE, find_model

    models = [find_model(model, args.cache_dir or DEFAULT_CACHE) for model in args.model]
    workloads = [_workload(args, model) for model in models]
    others = (*(["plain"] if args.plain else []), *([] if args.peer == "none" else [args.peer]))
    results = []
    for model, workload in zip(models, workloads, strict=True):
        results.append(measure_extraction(model.name, workload, args.rounds, others))
        print(table(results[-1]), end="\n\n", flush=True)
    if args.json is not None:
        write_json(args.json, results)


def _workload(args: argparse.Namespace, model: BenchmarkModel) -> Workload:
    from vllm.benchmarks.contenders import Workload

    layer_ids = tuple(args.layers or model.default_layer_ids)
    if not all(0 <= layer_id <= model.num_layers for layer_id in layer_ids):
        raise ValueError(f"--layers {list(layer_ids)}: use ids from 0 to {model.num_layers}")
    return Workload(
        checkpoint=model.checkpoint,
        vocabulary=model.vocabulary,
        layer_ids=layer_ids,
        num_prompts=args.prompts,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        storage_root=args.storage,
    )


def _check(args: argparse.Namespace) -> None:
    for option in ("prompts", "prompt_len", "rounds", "max_num_batched_tokens"):
        value = getattr(args, option)
        if value < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value}: use at least 1")
    if args.output_len < 0:
        raise ValueError(f"--output-len {args.output_len}: use 0 or more")
    if args.peer != "none" and args.output_len > 1:
        raise ValueError(
            f"--output-len {args.output_len} with --peer {args.peer}: the peer only runs the "
            "prompts; use 0 or 1"
        )


if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
