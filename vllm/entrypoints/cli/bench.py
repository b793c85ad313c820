"""``vllm bench``: measure the engine on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from vllm.entrypoints.cli.help import HelpFormatter
from vllm.platforms.interface import Platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.checked import config
from vllm.utils.options import Group, Option, add_flags, given_options, options_of

if TYPE_CHECKING:
    from vllm.bench.contenders import Workload
    from vllm.bench.models import BenchmarkModel

DEFAULT_MODEL = "qwen3.5-0.5b"


@config(frozen=True)
class BenchOptions:
    """Options of ``vllm bench extraction``.

    Raises ValueError that names the option, the value and what would work.
    """

    model: list[str] = field(default_factory=lambda: [DEFAULT_MODEL])
    """Folders of checkpoints, or built-in shapes with random weights: qwen3.5-0.5b, llama-1b,
    nemotron-h-0.5b, mamba2-370m."""
    peer: Literal["none", "transformers"] = "none"
    """Another package to measure as well."""
    peer_python: Annotated[Path | None, Option(metavar="FILE")] = None
    """Interpreter of an environment that has vLLM, which is measured as well, without extraction:
    it runs the prompts. It loads the model once a round."""
    model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    """Implementation of the model in this engine: its own class, or transformers' module on its
    pool."""
    cpu_time: bool = False
    """Measure the CPU seconds of each contender instead of wall-clock seconds, for a machine that
    others use too."""
    bound_dtype: Literal["auto", "float32"] = "auto"
    """Data type of the bound's products: the checkpoint's (auto), or float32, for CPUs that have
    only float32 products."""
    plain: bool = False
    """Also measure the engine without extraction."""
    prompts: int = 16
    """Number of prompts per round."""
    prompt_len: int = 512
    """Tokens per prompt."""
    output_len: int = 1
    """Tokens to generate per prompt; 0: none, and layers above the deepest extracted one do not
    run."""
    layers: list[int] | None = None
    """Layer ids; by default four, including the last."""
    rounds: int = 5
    """Number of timed rounds."""
    max_num_batched_tokens: int = Platform.default_max_num_batched_tokens
    """Most tokens per step."""
    json: Annotated[Path | None, Option(metavar="FILE")] = None
    """Also write all measurements to this file."""
    storage: Annotated[Path | None, Option(metavar="DIR")] = None
    """Folder for the hidden states; by default the system's temporary folder."""
    cache_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Folder for built-in shapes; by default ~/.cache/vllm/benchmarks."""

    def __post_init__(self) -> None:
        for option in ("prompts", "prompt_len", "rounds", "max_num_batched_tokens"):
            value = getattr(self, option)
            if value < 1:
                raise ValueError(f"--{option.replace('_', '-')} {value}: use at least 1")
        for option, folder in (("storage", self.storage), ("json", self.json and self.json.parent)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"--{option} {getattr(self, option)}: there is no folder {folder}")
        if self.output_len < 0:
            raise ValueError(f"--output-len {self.output_len}: use 0 or more")
        if self.peer_python is not None and self.cpu_time:
            raise ValueError(
                f"--peer-python {self.peer_python} with --cpu-time: the seconds of another package "
                "are those of the clock; leave one out"
            )
        if self.peer_python is not None and not os.access(self.peer_python, os.X_OK):
            raise ValueError(f"--peer-python {self.peer_python}: there is no interpreter")
        if self.peer != "none" and self.output_len > 1:
            raise ValueError(
                f"--output-len {self.output_len} with --peer {self.peer}: the peer only runs the "
                "prompts; use 0 or 1"
            )


def build_bench_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vllm bench`` without loading torch."""
    parser = FlexibleArgumentParser(
        prog="vllm bench", description="Measure the engine on this machine."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    extraction = benchmarks.add_parser(
        "extraction",
        help="speed of extracting hidden states",
        description="Speed of extraction in tokens per second, its share of the bound (the "
        "model's matrix products alone, measured in the same run), and a profile of the time. "
        "The contenders run in turn, each in its own process. Keep the machine otherwise idle.",
        formatter_class=HelpFormatter,
    )
    add_flags(extraction, options_of(BenchOptions, Group("Measurement", "")))
    return parser


def bench(arguments: Sequence[str]) -> int:
    """Run ``vllm bench ARGUMENTS``; returns the exit status."""
    parser = build_bench_parser()
    args = parser.parse_args(arguments)
    from vllm.bench.peer import PeerMissing

    try:
        run_extraction(BenchOptions(**given_options(BenchOptions, args)))
    except PeerMissing as missing:
        parser.exit(2, f"vllm bench: --peer-python {missing}\n")
    except ValueError as error:
        parser.exit(2, f"vllm bench: {error}\n")
    return 0


def run_extraction(args: BenchOptions) -> None:
    """Measure model by model, print the tables, and write the JSON file if one is requested.

    Raises ValueError that names the option, the value and what would work.
    """
    # The processes of the contenders inherit it; their logs would bury the table.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.bench.extraction import machine_line, measure_extraction, table, write_json
    from vllm.bench.models import DEFAULT_CACHE, find_model

    models = [find_model(model, args.cache_dir or DEFAULT_CACHE) for model in args.model]
    workloads = [_workload(args, model) for model in models]
    chosen = {"plain": args.plain, args.peer: args.peer != "none", "vllm": args.peer_python}
    others = tuple(name for name, is_chosen in chosen.items() if is_chosen)
    results = []
    print(machine_line(), flush=True)
    for model, workload in zip(models, workloads, strict=True):
        results.append(measure_extraction(model.name, workload, args.rounds, others))
        print(table(results[-1]), end="\n\n", flush=True)
    if args.json is not None:
        write_json(args.json, results)


def _workload(args: BenchOptions, model: BenchmarkModel) -> Workload:
    import torch

    from vllm.bench.contenders import Workload
    from vllm.config import ModelConfig

    layer_ids = tuple(args.layers or model.default_layer_ids)
    if not all(0 <= layer_id <= model.num_layers for layer_id in layer_ids):
        raise ValueError(f"--layers {list(layer_ids)}: use ids from 0 to {model.num_layers}")
    workload = Workload(
        checkpoint=model.checkpoint,
        vocabulary=model.vocabulary,
        layer_ids=layer_ids,
        num_prompts=args.prompts,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        peer_python=args.peer_python,
        storage_root=args.storage,
        engine_options={"model_impl": args.model_impl},
        counts_cpu_time=args.cpu_time,
        bound_dtype=torch.float32 if args.bound_dtype == "float32" else None,
    )
    try:
        ModelConfig(
            model=str(model.checkpoint),
            max_model_len=workload.max_model_len,
            skip_tokenizer_init=True,
            model_impl=args.model_impl,
        )
    except ValueError as error:
        lengths = f"--prompt-len {args.prompt_len} --output-len {args.output_len}"
        raise ValueError(f"--model {model.name} {lengths}: {error}") from error
    return workload
