"""The output for a person: the resolved settings, a progress bar, a table at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from vllm.entrypoints.extract.plan import PlanTotals
from vllm.entrypoints.extract.unit_queue import Progress
from vllm.hidden_states.manifest import DatasetTotals
from vllm.hidden_states.metadata import DatasetSettings
from vllm.utils.mem_utils import format_bytes
from vllm.utils.progress import progress_bar

Lines = list[tuple[str, str]]


class ProgressBar:
    """Shows tokens and their rate, the time left, samples, and the share of time spent on writing.

    ``num_workers`` write at the same time; ``num_tokens`` and ``num_samples`` remain to be done.
    """

    def __init__(self, num_tokens: int, num_samples: int, num_workers: int) -> None:
        self._num_samples = num_samples
        self._num_workers = num_workers
        self._started = time.monotonic()
        self._first: tuple[float, Progress] | None = None
        """Time and progress when the first rows were written; engines are loaded from then on."""
        self._bar = progress_bar(
            total=num_tokens, desc="Extracting", unit=" tokens", unit_scale=True
        )
        self._progress = Progress()

    def show(self, progress: Progress) -> None:
        """Show the total progress so far, which is less than before if a worker died."""
        self._progress = progress
        if self._first is None and progress.tokens:
            self._first = time.monotonic(), progress
        done = f"{progress.samples}/{self._num_samples} samples"
        self._bar.set_postfix_str(f"{done}, writing {self._rates()[1]:.0%}", refresh=False)
        self._bar.update(progress.tokens - self._bar.n)

    def _rates(self) -> tuple[float, float]:
        """Return the tokens per second, and the share of the workers' time spent on writing."""
        at, before = self._first or (time.monotonic(), self._progress)
        seconds = max(time.monotonic() - at, 1e-9)
        writing = self._progress.writing_seconds - before.writing_seconds
        share = min(1.0, writing / seconds / self._num_workers)
        return (self._progress.tokens - before.tokens) / seconds, share

    def close(self) -> None:
        self._bar.close()

    def lines(self) -> Lines:
        """Return the lines for the table at the end."""
        rate, writing_share = self._rates()
        seconds = time.monotonic() - self._started
        return [
            ("time", f"{seconds:.1f} s, including loading the model"),
            ("speed", f"{rate:,.0f} tokens/s, writing {writing_share:.1%} of the time"),
        ]


def settings_lines(settings: DatasetSettings) -> Lines:
    """Return the lines for the resolved settings."""
    model_dtype = settings.options["model_dtype"].strip('"').removeprefix("torch.")
    layers = ", ".join(map(str, settings.layer_ids)) or "none"
    return [
        ("model", settings.model + (f" @ {settings.revision}" if settings.revision else "")),
        (
            "layers",
            f"{layers} of {settings.num_hidden_layers}",
        ),
        ("convention", settings.convention),
        ("positions", settings.selection),
        *([("loss mask", settings.mask_rule)] if settings.mask_rule else []),
        *_sampling(settings),
        ("dtype", f"{settings.dtype} (the model's: {model_dtype})"),
        *((name, str(value)) for name, value in settings.request_options.items()),
        ("format", f"{settings.format}, units of {format_bytes(settings.shard_bytes)}"),
    ]


def _sampling(settings: DatasetSettings) -> Lines:
    stated = [one for one in settings.options.items() if one[0].startswith("sampling.")]
    texts = [f"{name.removeprefix('sampling.')} {value}" for name, value in stated]
    return [("generated", ", ".join(texts))] if texts else []


def plan_lines(totals: PlanTotals, num_units: int) -> Lines:
    """Return the lines for the plan."""
    added = [("added after", f"{totals.first_sample:,} samples")] if totals.first_unit else []
    return [
        *added,
        ("samples", f"{totals.num_samples:,} of {totals.num_records:,} records"),
        ("tokens", f"{totals.num_tokens:,}"),
        ("rows", f"{totals.num_rows:,}"),
        ("bytes", f"about {format_bytes(totals.num_bytes)} in {num_units:,} units"),
        *([("loss mask", f"in {totals.num_masked:,} samples")] if totals.num_masked else []),
        *([("truncated", f"{totals.num_truncated:,}")] if totals.num_truncated else []),
        *_other_counts(totals),
    ]


def _other_counts(plan: PlanTotals) -> Lines:
    counts = {
        "second BOS": (plan.num_second_bos, "texts"),
        "left over": (plan.num_left_over, "tokens, which fill no window"),
        "no mask": (plan.num_unmasked_windows, "windows, in which no token counts"),
    }
    return [(name, f"{count:,} {what}") for name, (count, what) in counts.items() if count]


def totals_lines(
    settings: DatasetSettings,
    totals: DatasetTotals,
    reasons: Iterable[str],
    plan: PlanTotals | None,
) -> Lines:
    """Return the lines for the finished dataset. ``reasons``: one for each skipped record, ``kind:
    details``; ``plan``: None if it is not known."""
    kinds = Counter(reason.split(":", 1)[0] for reason in reasons)
    lines = [
        ("samples", f"{totals.samples:,}"),
        ("tokens", f"{totals.tokens:,}"),
        ("rows", f"{totals.rows:,}"),
        ("bytes", format_bytes(totals.bytes)),
        *([("truncated", f"{plan.num_truncated:,}"), *_other_counts(plan)] if plan else []),
        ("skipped", f"{totals.skipped:,}"),
        *((f"  {kind}", f"{count:,}") for kind, count in kinds.most_common()),
    ]
    layer_ids = settings.layer_ids if totals.row_norms else ()  # a rank may have no units
    errors = totals.fp8_errors or [None] * len(layer_ids)
    for layer_id, norm, error in zip(layer_ids, totals.row_norms, errors, strict=True):
        suffix = "" if error is None else f", fp8 error {error:.2%}"
        lines.append((f"layer {layer_id}", f"mean row norm {norm:.4g}{suffix}"))
    return lines


def print_table(title: str, lines: Lines) -> None:
    """Print ``title``, then names and values in two columns."""
    width = max(len(name) for name, _ in lines)
    print(title)
    for name, value in lines:
        print(f"  {name:{width}}  {value}")
    print(flush=True)
