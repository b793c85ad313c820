"""The speed that this engine owes, row by row: what was asked for and what this machine gives.

Every ratio is measured in one run, the contenders in turn, each in a process of its own, and is
the median of the rounds' own ratios. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.row import Row
from benchmarks.scheduler_alone import measure_planning, measure_scheduler
from benchmarks.starts import measure_load, measure_start
from benchmarks.target_contenders import (
    AttentionBoundContender,
    CommandContender,
    DecodeContender,
    ExtractContender,
    WeightReadContender,
)
from vllm.bench.contenders import (
    BoundContender,
    Contender,
    EngineContender,
    PlainContender,
    TransformersContender,
    Workload,
    find_memory_folder,
)
from vllm.bench.extraction import describe_machine, measurement_json
from vllm.bench.models import find_model
from vllm.bench.rounds import Entry, run_in_turn

CACHE = Path(__file__).resolve().parent.parent / ".cache"
LEAST_STORAGE_BYTES = 4 * 2**30
LONG_POOL_BYTES = 1280 * 2**20
"""A pool that few rounds of long prompts fill: later ones touch no memory for the first time."""


@dataclass(frozen=True)
class Rival:
    """A contender to compare the engine with, and how much faster the engine has to be."""

    name: str
    contender: type[Contender]
    at_least: float
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the workload that differ for it."""


@dataclass(frozen=True)
class Target:
    """One measurement of a model; it gives a row for each rival."""

    work: str
    model: str
    num_prompts: int
    prompt_len: int
    rivals: tuple[Rival, ...]
    contender: type[Contender] = EngineContender
    changes: Mapping[str, Any] = field(default_factory=dict)


HYBRID, DENSE, MAMBA = "qwen3.5-0.5b", "llama-1b", "nemotron-h-0.5b"
_LONG: Mapping[str, Any] = MappingProxyType({
    "engine_options": {
        "kv_cache_memory_bytes": LONG_POOL_BYTES,
        "hf_overrides": {"max_position_embeddings": 65_536},  # the shape ends at 32,768
    }
})  # fmt: skip


def _decode(work: str, model: str, batch: int, quantization: str | None = None) -> Target:
    changes: dict[str, Any] = {"output_len": 129}
    if quantization:
        changes["engine_options"] = {"quantization": quantization}
    rivals = (Rival("reading the weights", WeightReadContender, 0.85),)
    return Target(f"{work}, decode, batch {batch}", model, batch, 16, rivals, DecodeContender,
        changes)  # fmt: skip


def _short(work: str, num_prompts: int, prompt_len: int, contender: type[Contender]) -> Target:
    rivals = (Rival("bound", BoundContender, 0.85),)
    return Target(work, HYBRID, num_prompts, prompt_len, rivals, contender, {"output_len": 0})


TARGETS = {
    "hybrid": Target(
        "hybrid 0.5B, 16 x 512, four layers",
        *(HYBRID, 16, 512),
        (Rival("bound", BoundContender, 0.85), Rival("transformers", TransformersContender, 2.0)),
    ),
    "dense": Target(
        "dense 1B, 16 x 512, four layers",
        *(DENSE, 16, 512),
        (Rival("bound", BoundContender, 0.90), Rival("transformers", TransformersContender, 1.3)),
    ),
    "mamba": Target(
        "Nemotron-H 0.5B, 16 x 512, four layers",
        *(MAMBA, 16, 512),
        (Rival("bound", BoundContender, 0.75),),
    ),
    "long-hybrid": Target(
        "hybrid 0.5B, 1 x 32,768",
        *(HYBRID, 1, 32_768),
        (Rival("bound with attention", AttentionBoundContender, 0.75),),
        changes=_LONG,
    ),
    "long-dense": Target(
        "dense 1B, 1 x 32,768",
        *(DENSE, 1, 32_768),
        (Rival("bound with attention", AttentionBoundContender, 0.75),),
        changes=_LONG,
    ),
    "short": Target(
        "hybrid, 512 x 16",
        *(HYBRID, 512, 16),
        (
            Rival("bound", BoundContender, 0.75),
            Rival("one by one", TransformersContender, 5.0, {"peer_batch_sizes": (1,)}),
        ),
    ),
    "extract-16": _short("LLM.extract, hybrid, 4,096 x 16", 4096, 16, ExtractContender),
    "extract-64": _short("LLM.extract, hybrid, 1,024 x 64", 1024, 64, ExtractContender),
    "command-16": _short("vllm extract, hybrid, 4,096 x 16", 4096, 16, CommandContender),
    "command-64": _short("vllm extract, hybrid, 1,024 x 64", 1024, 64, CommandContender),
    "plain": Target(
        "extraction against plain prefill",
        *(HYBRID, 16, 512),
        (Rival("plain prefill", PlainContender, 0.98),),
    ),
    "half-depth": Target(
        "layer 12 of 24 only, no output token",
        *(HYBRID, 16, 512),
        (Rival("full depth", EngineContender, 1.8, {"layer_ids": (24,)}),),
        changes={"layer_ids": (12,), "output_len": 0},
    ),
    "decode-hybrid-1": _decode("hybrid", HYBRID, 1),
    "decode-hybrid-16": _decode("hybrid", HYBRID, 16),
    "decode-int4-1": _decode("hybrid in INT4", HYBRID, 1, "int4"),
    "decode-int4-16": _decode("hybrid in INT4", HYBRID, 16, "int4"),
    "decode-mamba-1": _decode("Nemotron-H", MAMBA, 1),
    "decode-mamba-16": _decode("Nemotron-H", MAMBA, 16),
}
"""Ratios: speed of this engine over the rival's."""


ALONE: dict[str, Callable[[int], Iterator[Row]]] = {
    "scheduler": measure_scheduler,
    "planning": measure_planning,
    "start": measure_start,
    "load": lambda rounds: measure_load(rounds, CACHE),
}
"""Parts without a rival: what measures their rows, given the number of rounds."""


def measure_target(name: str, target: Target, rounds: int, overrides: dict[str, Any]) -> list[Row]:
    """All rivals of one target in one run."""
    model = find_model(target.model, CACHE)
    base = Workload(
        checkpoint=model.checkpoint,
        vocabulary=model.vocabulary,
        layer_ids=model.default_layer_ids,
        num_prompts=target.num_prompts,
        prompt_len=target.prompt_len,
    )
    workload = replace(base, **{**target.changes, **overrides})
    entries = [
        Entry("this engine", target.contender, workload),
        *(Entry(r.name, r.contender, replace(workload, **r.changes)) for r in target.rivals),
    ]
    results = run_in_turn(entries, rounds)
    details = {key: measurement_json(result) for key, result in results.items()}
    return [
        Row(
            name,
            target.work,
            rival.name,
            f">= {rival.at_least:g}",
            results["this engine"].speed_over(results[rival.name]),
            rounds,
            details,
        )
        for rival in target.rivals
    ]


def measure(names: Sequence[str], rounds: int, overrides: dict[str, Any]) -> Iterator[Row]:
    """The rows of these targets, one after another."""
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        if name in ALONE:
            yield from ALONE[name](rounds)
        else:
            yield from measure_target(name, TARGETS[name], rounds, overrides)


def results(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Return what ``--json`` writes; benchmarks/report.py reads it from benchmarks/results."""
    return {
        "machine": describe_machine(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "command": command,
        "conditions": "",
        "rows": [row.as_json() for row in rows],
    }


def _commit() -> str | None:
    """The checked-out commit, with "+" where files differ from it; None outside of a checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=CACHE.parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*TARGETS, *ALONE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
        help=", ".join(names))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="where hidden states go (default: memory)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: use at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = []
    print(f"{'':42}{'against':24}{'target':>10}{'measured':>12}")
    storage = options.storage or find_memory_folder(LEAST_STORAGE_BYTES)
    for row in measure(options.only, options.rounds, {"storage_root": storage}):
        rows.append(row)
        verdict = "met" if row.is_met else "MISSED"
        measured = f"{row.measured:,.3f}" if row.measured < 1000 else f"{row.measured:,.0f}"
        line = f"{row.work:42}{row.against:24}{row.target:>10}{measured:>12}  {verdict}"
        print(line, flush=True)
    if options.json is not None:
        words = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "benchmarks/targets.py", *words])
        options.json.write_text(json.dumps(results(rows, command), indent=2) + "\n")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
