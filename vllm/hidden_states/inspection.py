"""A summary of a dataset, and a table of its layers, as text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest

import torch

from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.manifest import sum_units
from vllm.hidden_states.metadata import read_unit_records
from vllm.hidden_states.row_statistics import LayerDifferences, RowStatistics
from vllm.hidden_states.tensor_file import dtype_name

_MOST_LISTED = 6
"""Most dimensions of a layer that a table lists."""
Table = list[list[str]]
"""Rows of cells; the first has the titles."""


def describe(dataset: HiddenStatesDataset) -> str:
    """Return the summary as lines of text."""
    return "\n".join(f"{name:20}{value}".rstrip() for name, value in summarize(dataset))


def summarize(dataset: HiddenStatesDataset) -> list[tuple[str, object]]:
    """Return the summary as names and values."""
    lengths = torch.tensor([dataset.num_tokens(i) for i in range(len(dataset))])
    entries: list[tuple[str, object]] = [
        ("folder", dataset.path),
        *_settings_entries(dataset),
        ("samples", len(dataset)),
    ]
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
    return entries


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


def layer_names(dataset: HiddenStatesDataset, statistics: RowStatistics) -> list[str]:
    """Return the ids of the layers as text, or the numbers of the slots if files do not say."""
    slots = range(statistics.norms.shape[1])
    return [str(layer_id) for layer_id in dataset.layer_ids] or [f"slot {slot}" for slot in slots]


def layer_table(statistics: RowStatistics, names: Sequence[str]) -> Table:
    """Norms, dead and huge dimensions of each layer."""
    table = [["layer id", "norm 1 %", "median", "99 %", "dead dimensions", "huge dimensions"]]
    levels = torch.tensor([0.01, 0.5, 0.99])
    for slot, name in enumerate(names):
        norms = statistics.norms[:, slot]
        # torch.quantile takes at most 16 million values
        places = (levels * (len(norms) - 1)).round().long()
        spread = norms.sort().values[places].tolist() if len(norms) else [torch.nan] * 3
        dead = [str(number) for number in statistics.dead[slot]]
        huge = [f"{number} ({ratio:.0f}x)" for number, ratio in statistics.huge[slot]]
        table.append([name, *(f"{norm:.4g}" for norm in spread), _listed(dead), _listed(huge)])
    return table


def difference_table(differences: LayerDifferences, names: Sequence[str]) -> Table:
    """Differences between two datasets, by layers."""
    columns = differences[1:]
    values = zip(names, *(column.tolist() for column in columns), strict=True)
    table = [["layer id", "largest difference", "mean", "largest of a row (relative)", "cosine"]]
    return table + [
        [name, f"{most:.3g}", f"{mean:.3g}", f"{relative:.3g}", f"{cosine:.6f}"]
        for name, most, mean, relative, cosine in values
    ]


def format_table(table: Table) -> str:
    """Return lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (zip(row, widths, strict=True) for row in table)
    return "\n".join("  ".join(f"{c:{width}}" for c, width in row).rstrip() for row in lines)


def _listed(items: Sequence[str]) -> str:
    if not items:
        return "none"
    more = len(items) - _MOST_LISTED
    text = ", ".join(items[:_MOST_LISTED])
    return f"{len(items)}: {text}{f' and {more} more' if more > 0 else ''}"
