"""A summary of a dataset, and plots of its rows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.manifest import sum_units
from vllm.hidden_states.metadata import read_unit_records
from vllm.hidden_states.tensor_file import dtype_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS_OF_A_SAMPLE = 256
_MOST_BARS = 50
_MOST_NUMBERS = 12
"""Largest number of layers for which the cosines are written into the plot."""


class RowStatistics(NamedTuple):
    """Statistics of the rows of some samples, evenly spaced over the dataset."""

    num_samples: int
    norms: torch.Tensor
    """float32 [rows, layers], L2 norms of the rows"""
    cosines: torch.Tensor
    """float32 [layers, layers], means over the rows"""


def measure_rows(dataset: HiddenStatesDataset, max_samples: int) -> RowStatistics:
    """Measure the norms of rows and the cosines between layers, at evenly spaced rows."""
    count = min(max_samples, len(dataset))
    norms, cosines = [], []
    for place in range(count):
        sample = dataset[place * len(dataset) // count]
        rows = sample.rows()
        step = -(-len(rows) // _ROWS_OF_A_SAMPLE) or 1
        part = rows[::step].float()  # [rows, layers, hidden]
        norms.append(part.norm(dim=-1))
        unit = torch.nn.functional.normalize(part, dim=-1)
        cosines.append(unit @ unit.mT)
    layers = len(dataset.layer_ids)
    empty = torch.zeros(0, layers)
    return RowStatistics(
        count,
        torch.cat(norms) if norms else empty,
        torch.cat(cosines).mean(0) if norms else torch.zeros(layers, layers),
    )


def describe(dataset: HiddenStatesDataset) -> str:
    """Return the summary as lines of text."""
    lengths = torch.tensor([dataset.num_tokens(i) for i in range(len(dataset))])
    entries = [("folder", dataset.path), *_settings_entries(dataset), ("samples", len(dataset))]
    if len(lengths):
        spread = f"{lengths.min()} to {lengths.max()}, median {lengths.median()}"
        num_rows = sum(dataset.num_rows(i) for i in range(len(dataset)))
        entries += [("tokens", int(lengths.sum())), ("rows", num_rows)]
        entries.append(("tokens per sample", spread))
    size = sum(os.path.getsize(path) for path in dataset.file_paths)
    entries += [("files", len(dataset.file_paths)), ("bytes", f"{size:,}")]
    if dataset.settings is not None:
        totals = sum_units(read_unit_records(dataset.path))
        errors = [f"{error:.3%}" for error in totals.fp8_errors or ()]
        entries.append(("layer id", "mean row norm" + ("  mean error of fp8" if errors else "")))
        values = zip_longest(map("{:<15.6g}".format, totals.row_norms), errors, fillvalue="")
        entries += zip(map(str, dataset.layer_ids), map("".join, values), strict=False)
    return "\n".join(f"{name:20}{value}".rstrip() for name, value in entries)


def _settings_entries(dataset: HiddenStatesDataset) -> list[tuple[str, object]]:
    settings = dataset.settings
    form = [("layer ids", list(dataset.layer_ids)), ("hidden size", dataset.hidden_size)]
    if settings is None:
        return [("format", "files, no manifest"), *form]
    entries = [
        ("model", " ".join(part for part in (settings.model, settings.revision) if part)),
        ("format", settings.format),
        *form,
        ("dtype", settings.dtype),
        ("positions", settings.selection),
        *([("loss mask", settings.mask_rule)] if settings.mask_rule else []),
        ("engine version", settings.engine_version),
        *settings.request_options.items(),
    ]
    forms = {
        name: f" {dtype_name(form.dtype)} {list(form.shape)}"
        for name, form in settings.request_tensors.items()
    }
    if names := settings.stored_names.tensors:
        entries.append(("other tensors", ", ".join(name + forms.get(name, "") for name in names)))
    if dataset.manifest is None:
        entries.append(("state", "not complete"))
    else:
        entries.append(("skipped", dataset.manifest["totals"]["skipped"]))
    if settings.origin is not None:
        entries.append(("converted from", f"{settings.origin.format}, {settings.origin.dtype}"))
    return entries


def write_plots(dataset: HiddenStatesDataset, folder: str, max_samples: int = 64) -> list[str]:
    """Write three PNG files in ``folder``; returns their paths. Raises ImportError if matplotlib is
    missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    os.makedirs(folder, exist_ok=True)
    statistics = measure_rows(dataset, max_samples)
    labels = [str(layer_id) for layer_id in dataset.layer_ids] or [
        f"slot {slot}" for slot in range(statistics.norms.shape[1])
    ]
    lengths = [dataset.num_tokens(i) for i in range(len(dataset))]
    plots: dict[str, Callable[[Axes], None]] = {
        "row_norms": lambda axes: _draw_norms(axes, statistics, labels),
        "lengths": lambda axes: _draw_lengths(axes, lengths),
        "layer_cosines": lambda axes: _draw_cosines(axes, statistics, labels),
    }
    paths = []
    for name, draw in plots.items():
        figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
        draw(axes)
        paths.append(os.path.join(folder, f"{name}.png"))
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw_norms(axes: Axes, statistics: RowStatistics, labels: Sequence[str]) -> None:
    axes.boxplot(statistics.norms.numpy(), tick_labels=labels, whis=(1, 99), showfliers=False)
    rows = f"{len(statistics.norms):,} rows of {statistics.num_samples} samples"
    title = f"Row norms ({rows}; whiskers: 1 % and 99 %)"
    axes.set(title=title, xlabel="layer id", ylabel="L2 norm", yscale="log")


def _draw_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    if lengths:  # bars around whole numbers
        first, last = min(lengths), max(lengths)
        width = -(-(last - first + 1) // _MOST_BARS)
        edges = [first - 0.5 + width * bar for bar in range((last - first) // width + 2)]
        axes.hist(lengths, bins=edges, edgecolor="white", linewidth=0.5)
    axes.set(title=f"Lengths of {len(lengths):,} samples", xlabel="tokens", ylabel="samples")


def _draw_cosines(axes: Axes, statistics: RowStatistics, labels: Sequence[str]) -> None:
    image = axes.imshow(statistics.cosines.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
    ticks = range(len(labels))
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    for row, column in itertools.product(ticks, ticks) if len(labels) <= _MOST_NUMBERS else ():
        value = float(statistics.cosines[row, column])
        color = "white" if abs(value) > 0.7 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    title = "Mean cosine between the rows of two layers"
    axes.set(title=title, xlabel="layer id", ylabel="layer id")
    axes.figure.colorbar(image, label="cosine")
