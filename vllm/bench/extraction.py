"""``vllm bench extraction``: speed, share of the bound, and a profile of the time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm.bench.contenders import CONTENDERS, Workload
from vllm.bench.profile import PARTS, Profile
from vllm.bench.rounds import Entry, Measurement, run_in_turn
from vllm.ops.operation import source_of
from vllm.platforms import get_platform
from vllm.utils.cpu_utils import cpu_name
from vllm.version import __version__

LABELS = {
    "extraction": "this engine",
    "plain": "this engine, no extraction",
    "transformers": "transformers",
    "vllm": "vLLM, no extraction",
    "bound": "bound: linear layers alone",
}


@dataclass(frozen=True)
class ExtractionResult:
    """Measurements of one model by contender, including "extraction" and "bound"."""

    model: str
    workload: Workload
    measurements: dict[str, Measurement]

    @property
    def speed_ratios(self) -> dict[str, float]:
        """Speed of this engine with extraction over the speed of each other contender."""
        ours = self.measurements["extraction"]
        others = [m for m in self.measurements.values() if m is not ours]
        return {other.name: ours.speed_over(other) for other in others}

    @property
    def profile(self) -> Profile:
        profile = self.measurements["extraction"].profile
        assert profile is not None
        return profile

    def as_json(self) -> dict[str, Any]:
        """Return everything measured as JSON values."""
        return {
            "model": self.model,
            "layer_ids": list(self.workload.layer_ids),
            "num_prompts": self.workload.num_prompts,
            "prompt_len": self.workload.prompt_len,
            "output_len": self.workload.output_len,
            "cpu_time": self.workload.counts_cpu_time,
            "share_of_bound": self.speed_ratios["bound"],
            "speed_ratios": self.speed_ratios,
            "contenders": {name: measurement_json(m) for name, m in self.measurements.items()},
            "profile": {
                "seconds": self.profile.seconds,
                "shares": self.profile.shares,
                "total_seconds": self.profile.total_seconds,
                "writer_seconds": self.profile.writer_seconds,
            },
        }


def measure_extraction(
    model: str, workload: Workload, rounds: int, others: tuple[str, ...] = ()
) -> ExtractionResult:
    """Run the engine, ``others`` (keys of LABELS) and the bound in turn, then a profile."""
    kinds = ("extraction", *others, "bound")
    entries = [Entry(kind, CONTENDERS[kind], workload) for kind in kinds]
    return ExtractionResult(model, workload, run_in_turn(entries, rounds, profiled="extraction"))


def measurement_json(measurement: Measurement) -> dict[str, Any]:
    """Return one contender's rounds as JSON values."""
    return {
        "seconds": measurement.seconds,
        "tokens_per_second": measurement.num_tokens / measurement.median_seconds,
        "bytes_written": measurement.bytes_written,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "note": measurement.note,
    }


def table(result: ExtractionResult) -> str:
    """Return the report for the user."""
    return "\n".join([*_speed_lines(result), "", *_profile_lines(result.profile)])


def _speed_lines(result: ExtractionResult) -> Iterator[str]:
    workload, ratios = result.workload, result.speed_ratios
    layers = ", ".join(map(str, workload.layer_ids))
    yield (
        f"{result.model}: {workload.num_prompts} prompts x {workload.prompt_len} tokens, "
        f"{workload.output_len} output tokens, layers {layers}"
    )
    seconds = "CPU seconds" if workload.counts_cpu_time else "seconds"
    yield f"{'':28}{'tokens/s':>10}{f'{seconds} (min-max)':>24}{'peak MB':>9}{'ratio':>8}"
    for name, m in result.measurements.items():
        median = m.median_seconds
        spread = f"{median:.3f} ({min(m.seconds):.3f}-{max(m.seconds):.3f})"
        ratio = f"{ratios[name]:.3f}" if name in ratios else ""
        yield (
            f"{LABELS[name]:28}{m.num_tokens / median:>10,.0f}{spread:>24}"
            f"{m.peak_memory_bytes / 1e6:>9,.0f}{ratio:>8}  {m.note}"
        )
    yield "ratio: speed of this engine with extraction over the row's; median of the rounds' ratios"
    yield f"share of the bound: {ratios['bound']:.1%}"


def _profile_lines(profile: Profile) -> Iterator[str]:
    yield f"{'where the time goes (one more round)':40}{'seconds':>10}{'share':>8}"
    for part, label in PARTS.items():
        yield f"{label:40}{profile.seconds[part]:>10.3f}{profile.shares[part]:>8.1%}"
    yield f"writer threads, in parallel: {profile.writer_seconds:.3f} s"


def describe_machine() -> dict[str, Any]:
    """Return the facts about the machine that the figures depend on."""
    return {
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "threads": get_platform("cpu").set_num_threads(),
        "kernels": source_of("cpu").name,
        "torch": torch.__version__,
        "vllm": __version__,
    }


def machine_line() -> str:
    """Return the facts about the machine as one line of text."""
    machine = describe_machine()
    return (
        f"{machine['cpu']}, {machine['logical_cpus']} logical CPUs, {machine['threads']} threads; "
        f"kernels {machine['kernels']}; torch {machine['torch']}; vllm {machine['vllm']}"
    )


def write_json(path: Path, results: list[ExtractionResult]) -> None:
    """Write all results, with a description of the machine."""
    document = {"machine": describe_machine(), "results": [r.as_json() for r in results]}
    path.write_text(json.dumps(document, indent=2) + "\n")
