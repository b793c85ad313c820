"""The steps from committed units to a finished dataset, and back to an open one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.hidden_states import metadata as records
from vllm.hidden_states.mapped_file import DamagedFileError, MappedFile
from vllm.hidden_states.metadata import (
    AddedInput,
    DatasetSettings,
    SkippedRecord,
    UnitRecord,
    read_unit_records,
    to_json,
)
from vllm.hidden_states.tensor_file import checksum
from vllm.hidden_states.units import writer_of
from vllm.utils.regular_files import open_regular
from vllm.utils.whole_files import write_whole

_KIND = "vllm hidden states"
_VERSION = 1


@dataclass(frozen=True)
class DatasetTotals:
    """Totals of a dataset, or of the units that exist."""

    samples: int
    tokens: int
    rows: int
    bytes: int
    skipped: int
    row_norms: tuple[float, ...]
    """Mean norm of a row, for each layer."""
    fp8_errors: tuple[float, ...] | None
    """Mean relative error of a row in fp8, for each layer; None if not measured."""


def start_dataset(
    directory: str, settings: DatasetSettings, *, mixes_kernels: bool = False
) -> list[UnitRecord]:
    """Make the directory, or continue in it; returns the units that are committed there.

    mixes_kernels: accept units that other kernels computed. Raises ValueError that names the
    differences if the directory holds a dataset of other settings.
    """
    os.makedirs(directory, exist_ok=True)
    if os.path.exists(os.path.join(directory, records.SETTINGS_FILE)):
        _check_same(directory, settings, mixes_kernels)
    else:
        settings.write(directory)
    return read_unit_records(directory)


def _check_same(directory: str, settings: DatasetSettings, mixes_kernels: bool) -> None:
    stored = DatasetSettings.read(directory)
    differences = stored.differences(settings, mixes_kernels=mixes_kernels)
    if differences:
        raise ValueError(
            f"{directory} holds a dataset of other settings; choose another folder, or the "
            "same settings:\n  " + "\n  ".join(differences)
        )


def continue_settings(
    directory: str, settings: DatasetSettings, *, appends: bool, mixes_kernels: bool = False
) -> DatasetSettings:
    """Return the settings of a run on one input as they are for the whole dataset.

    appends: an input that is not in the dataset is added to it; its units are not counted yet.
    Raises ValueError if it cannot be added, because the dataset is not complete or has other
    settings.
    """
    if not os.path.exists(os.path.join(directory, records.SETTINGS_FILE)):
        return settings
    stored = DatasetSettings.read(directory)
    digest = settings.input_digest
    if not appends or digest in (one.input_digest for one in stored.inputs):
        return settings.like(stored)
    read_manifest(directory)
    both = dataclasses.replace(settings, input_digest=stored.input_digest).like(stored)
    _check_same(directory, both, mixes_kernels)
    try:
        num_records = _count_records(directory)
    except (OSError, DamagedFileError) as error:
        what = f"append: a file of {directory} is missing or damaged ({error})"
        raise ValueError(f"{what}; run the command that made it first") from error
    start = AddedInput(digest, stored.num_units, stored.num_samples, num_records)
    return dataclasses.replace(both, added=(*stored.added, start))


def _count_records(directory: str) -> int:
    """Return a number above those of all records of the input of a finished dataset."""
    numbers = [one.record for one in read_skipped(directory)]
    is_packed = "pack" in DatasetSettings.read(directory).options
    for unit in read_unit_records(directory):
        for one in unit.files:
            file = MappedFile(os.path.join(directory, one.name))
            if "record_index" in file:
                numbers += file.tensor("record_index").tolist()
            else:
                numbers.append(int(file.metadata["record"]))
            if is_packed:
                samples = range(len(file.offsets("row_offsets")) - 1)
                texts = [text for n in samples for text in file.columns(n)["texts"]]
                numbers += [text["record"] for text in texts]
    return max(numbers, default=-1) + 1


def add_input(directory: str, settings: DatasetSettings) -> None:
    """Make a finished dataset one that lacks the units of the input that ``settings`` add."""
    stored = DatasetSettings.read(directory)
    grown = stored.with_plan(settings.num_units, settings.num_samples, stored.has_loss_mask)
    dataclasses.replace(grown, added=settings.added).write(directory)
    with contextlib.suppress(FileNotFoundError):  # another rank was faster
        os.unlink(os.path.join(directory, records.MANIFEST_FILE))


def missing_units(directory: str) -> list[int]:
    """Return the units that have no record; raises ValueError if there are no settings."""
    done = {record.unit for record in read_unit_records(directory)}
    return [unit for unit in range(DatasetSettings.read(directory).num_units) if unit not in done]


def merge_units(directory: str, skipped: Sequence[SkippedRecord] = ()) -> DatasetTotals:
    """Write the index and the manifest of committed units, and remove ``units/``.

    ``skipped``: records that were left out before any unit was planned.
    Raises ValueError if units are missing. A second call changes nothing.
    """
    settings = DatasetSettings.read(directory)
    if missing_units(directory):
        raise ValueError(_describe_missing(directory))
    units = read_unit_records(directory)
    described = writer_of(settings.format).describe(directory, settings, units)
    for name, content in described.items():
        write_whole(os.path.join(directory, name), content)
    index = {"units": [*map(to_json, units)], "skipped": [*map(to_json, skipped)]}
    index_checksum = records.write_json(os.path.join(directory, records.INDEX_FILE), index)
    manifest = make_manifest(settings, units, skipped, index_checksum)
    records.write_json(os.path.join(directory, records.MANIFEST_FILE), manifest)
    shutil.rmtree(os.path.join(directory, records.UNITS_FOLDER), ignore_errors=True)
    return sum_units(units, skipped)


def make_manifest(
    settings: DatasetSettings,
    units: Sequence[UnitRecord],
    skipped: Sequence[SkippedRecord],
    index_checksum: str,
) -> dict[str, Any]:
    """Return the content of ``manifest.json`` for a dataset of these units."""
    shards = None
    if settings.format == "sharded":
        shards = [to_json(file) for unit in units for file in unit.files]
    return {
        "kind": _KIND,
        "version": _VERSION,
        "settings": to_json(settings),
        "totals": dataclasses.asdict(sum_units(units, skipped)),
        "index_checksum": index_checksum,
        "shards": shards,
    }


def read_manifest(directory: str) -> dict[str, Any]:
    """Read the manifest; raises ValueError if it is missing (says why) or of another kind."""
    path = os.path.join(directory, records.MANIFEST_FILE)
    if not os.path.exists(path):
        raise ValueError(_describe_missing(directory))
    manifest: dict[str, Any] = records.read_json(path)
    if not isinstance(manifest, dict) or manifest.get("kind") != _KIND:
        raise ValueError(f"{path} is not the manifest of a dataset of hidden states")
    version = manifest.get("version")
    if version != _VERSION:
        raise ValueError(f"{path} is of version {version}; this package reads {_VERSION}")
    return manifest


def index_is_sound(directory: str) -> bool:
    """Return whether a finished dataset's index is the one its manifest was written for."""
    try:
        manifest = records.read_json(os.path.join(directory, records.MANIFEST_FILE))
        expected: str = manifest["index_checksum"]
        index_path = os.path.join(directory, records.INDEX_FILE)
        with open_regular(index_path, records.MOST_JSON_BYTES) as index:
            return checksum(index.read()) == expected
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return True  # not finished, or the manifest is damaged: it is written again
    except OSError:
        return False


def read_skipped(directory: str) -> list[SkippedRecord]:
    """Return all records that a finished dataset skipped, in the order of the input."""
    index = records.read_json(os.path.join(directory, records.INDEX_FILE))
    found = [SkippedRecord(**entry) for entry in index["skipped"]]
    found += [skipped for unit in read_unit_records(directory) for skipped in unit.skipped]
    return sorted(found, key=lambda skipped: skipped.record)


def _describe_missing(directory: str) -> str:
    missing = missing_units(directory)
    if not missing:
        return f"{directory}: every unit is there, but no manifest; run the command again"
    some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    settings = DatasetSettings.read(directory)
    command = "the command of each input" if settings.added else "the same command"
    return (
        f"{directory} is not complete: {len(missing)} of {settings.num_units} units are missing "
        f"({some}); run {command} again to make them"
    )


def sum_units(units: Sequence[UnitRecord], skipped: Sequence[SkippedRecord] = ()) -> DatasetTotals:
    """Return sums and means over all units; sums are exact, so they do not depend on the order."""
    rows = sum(unit.num_rows for unit in units)
    errors = [unit.fp8_error_sums for unit in units if unit.num_rows]
    measured = [error for error in errors if error is not None]
    return DatasetTotals(
        samples=sum(unit.num_samples for unit in units),
        tokens=sum(unit.num_tokens for unit in units),
        rows=rows,
        bytes=sum(file.size for unit in units for file in unit.files),
        skipped=len(skipped) + sum(len(unit.skipped) for unit in units),
        row_norms=_means([unit.row_norm_sums for unit in units], rows),
        fp8_errors=_means(measured, rows) if measured and len(measured) == len(errors) else None,
    )


def _means(sums: Sequence[Sequence[float]], count: int) -> tuple[float, ...]:
    return tuple(math.fsum(column) / max(1, count) for column in zip(*sums, strict=True))
