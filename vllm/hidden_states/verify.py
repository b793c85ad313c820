"""Checks that a dataset has not changed since it was written; each problem names its file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress

import torch

from vllm.hidden_states import metadata as records
from vllm.hidden_states.column_checks import find_bad_columns
from vllm.hidden_states.dataset import NO_FILES, SAFETENSORS, SampleFile, plain_files
from vllm.hidden_states.manifest import make_manifest, missing_units, read_manifest
from vllm.hidden_states.mapped_file import DamagedFileError, MappedFile
from vllm.hidden_states.metadata import (
    DatasetSettings,
    FileRecord,
    SkippedRecord,
    UnitRecord,
    read_unit_records,
)
from vllm.hidden_states.names import FORMATS
from vllm.hidden_states.positions import positions_fit
from vllm.hidden_states.tensor_file import checksum, file_checksum
from vllm.hidden_states.units import WHOLE_UNIT
from vllm.utils.regular_files import open_regular
from vllm.v1.rows.fields import StoredNames
from vllm.v1.rows.fields.fp8 import exact_rows, row_norms, row_parts

_ABSENT = "not there"


def verify_dataset(directory: str) -> Iterator[str]:
    """Yield a line for each problem: checksums, shapes, offsets, rows that are not finite, totals.

    A plain folder of files is checked as far as the files' own metadata allow. ValueError: there is
    nothing to check.
    """
    try:
        settings = DatasetSettings.read(directory) if records.is_described(directory) else None
    except ValueError as error:
        yield str(error)
        return
    if settings is None:
        yield from _verify_plain(directory)
        return
    units = read_unit_records(directory)
    for unit in missing_units(directory):
        yield f"{records.unit_path(directory, unit)}: unit {unit} is missing"
    for unit_record in units:
        yield from verify_unit(directory, unit_record, full=True)
    known = {file.name for unit_record in units for file in unit_record.files}
    kinds = {os.path.splitext(name)[1] for name in known} - {".json"}  # descriptions are JSON
    for name in plain_files(directory, (SAFETENSORS, *kinds)):
        if name not in known:
            yield f"{os.path.join(directory, name)}: the file belongs to no unit"
    yield from _verify_manifest(directory, settings, units)


def _verify_plain(directory: str) -> Iterator[str]:
    first: SampleFile | None = None
    names = plain_files(directory)
    if not names:
        raise ValueError(f"{directory}: {NO_FILES}")
    for name in names:
        path = os.path.join(directory, name)
        yield from _verify_file(path, None, None)
        with suppress(DamagedFileError):  # it was reported
            file = SampleFile(path)
            first = first or file
            if problem := file.other_form(first.layer_ids, first.row_shape):
                yield problem


def verify_unit(directory: str, record: UnitRecord, full: bool) -> list[str]:
    """Return the problems of one unit; ``full=False`` checks only the sizes of its files."""
    return [*itertools.chain.from_iterable(unit_problems(directory, record, full).values())]


def unit_problems(directory: str, record: UnitRecord, full: bool) -> dict[str, list[str]]:
    """Return what :func:`verify_unit` returns, by the names of files, or WHOLE_UNIT."""
    settings = DatasetSettings.read(directory)
    is_dataset = settings.format in FORMATS
    if record.settings_digest not in ("", settings.digest_of_unit(record.unit)):
        problem = (
            f"{directory}: unit {record.unit} was made with other settings, or from another "
            f"input, than {records.SETTINGS_FILE} states"
        )
        return {WHOLE_UNIT: [problem]}
    found = {}
    for expected in record.files:
        path = os.path.join(directory, expected.name)
        size_problem = _size_problem(path, expected)
        problems = [size_problem] if size_problem else []
        if full and is_dataset:
            problems = [*_verify_file(path, expected, settings)]
        elif full and not problems and file_checksum(path) != expected.checksum:
            problems = [f"{path}: it is not as it was written"]
        if problems:
            found[expected.name] = problems
    if found or not full or not is_dataset:
        return found
    files = [MappedFile(os.path.join(directory, expected.name)) for expected in record.files]
    counts = (
        sum(len(file.offsets("row_offsets")) - 1 for file in files),
        sum(file.shape("token_ids")[0] for file in files),
        sum(file.shape("hidden_states")[0] for file in files),
    )
    recorded = (record.num_samples, record.num_tokens, record.num_rows)
    if counts == recorded:
        return {}
    problem = (
        f"{directory}: unit {record.unit} has {counts} samples, tokens and rows; its record says "
        f"{recorded}"
    )
    return {WHOLE_UNIT: [problem]}


def _verify_file(
    path: str, expected: FileRecord | None, settings: DatasetSettings | None
) -> Iterator[str]:
    if expected is not None and (problem := _size_problem(path, expected)):
        yield problem
        return
    try:
        file = SampleFile(path)
        if expected is not None and file.header_checksum != expected.checksum:
            yield f"{path}: its header is not the one that was written"
            return
        yield from list(file.problems()) or _verify_content(file, settings)
    except DamagedFileError as error:
        yield str(error)


def _verify_content(file: SampleFile, settings: DatasetSettings | None) -> Iterator[str]:
    shape = file.shape("hidden_states")
    if settings is not None:
        if tuple(shape[1:]) != (len(settings.layer_ids), settings.hidden_size):
            yield f"{file.path}: rows of shape {tuple(shape[1:])}"
        if file.tensor("hidden_states", 0, 1).dtype != settings.torch_dtype:
            yield f"{file.path}: rows are not {settings.torch_dtype}"
        for name, form in settings.request_tensors.items() if shape[0] else ():
            stored = file.tensor(name, 0, 1)
            if (stored.dtype, tuple(stored.shape[1:])) != form:
                yield f"{file.path}: {name} are not {form.dtype} {list(form.shape)}"
    found = []
    for name, end in (("token_offsets", file.shape("token_ids")[0]), ("row_offsets", shape[0])):
        offsets = file.offsets(name)
        if offsets[0] != 0 or offsets[-1] != end or (offsets.diff() < 0).any():
            yield f"{file.path}: {name} do not ascend from 0 to {end}"
            return
        found.append(offsets)
    token_offsets, row_offsets = found
    if len(token_offsets) != len(row_offsets):
        yield f"{file.path}: {len(row_offsets)} row offsets, {len(token_offsets)} token offsets"
    elif "positions" in file:
        if not positions_fit(file.tensor("positions"), row_offsets, token_offsets):
            yield f"{file.path}: positions are not ascending token numbers of their samples"
    elif not torch.equal(row_offsets, token_offsets):
        yield f"{file.path}: {shape[0]} rows for {file.shape('token_ids')[0]} tokens"
    # In a dataset the checksums say that everything is as it was written.
    for place in range(len(row_offsets) - 1) if settings is None else ():
        try:
            file.sample(place, place)
        except Exception as error:  # whatever wrong metadata lead to
            yield f"{file.path}: sample {place} cannot be read: {error!r}"
            return
    yield from _verify_finite(file, row_offsets)
    names = [name for name in StoredNames.in_file(file.metadata).tensors if name in file]
    others = {name: file.shape(name)[0] for name in names if file.shape(name)[0] != shape[0]}
    for name, count in others.items():
        yield f"{file.path}: {name} has {count} rows instead of {shape[0]}"
    if not others:
        yield from find_bad_columns(file, row_offsets, token_offsets)


def _verify_finite(file: MappedFile, row_offsets: torch.Tensor) -> Iterator[str]:
    values, scales = file.tensor("hidden_states"), file.scales()
    for part in row_parts(values):
        rows = values[part], None if scales is None else scales[part]
        if torch.isfinite(row_norms(*rows)).all():
            continue
        bad = ~torch.isfinite(exact_rows(*rows)).all(-1).all(-1)
        for row in (part.start + bad.nonzero().flatten()).tolist():
            sample = int(torch.searchsorted(row_offsets, row, right=True)) - 1
            number = file.metadata.get("sample", sample)
            if "sample_index" in file:
                number = int(file.tensor("sample_index")[sample])
            yield f"{file.path}: row {row} (sample {number}) is not finite"


def _verify_manifest(
    directory: str, settings: DatasetSettings, units: list[UnitRecord]
) -> Iterator[str]:
    path = os.path.join(directory, records.MANIFEST_FILE)
    index_path = os.path.join(directory, records.INDEX_FILE)
    try:
        manifest = read_manifest(directory)
    except ValueError as error:
        yield f"{path}: {error}"
        return
    try:
        skipped = [SkippedRecord(**entry) for entry in records.read_json(index_path)["skipped"]]
        with open_regular(index_path, records.MOST_JSON_BYTES) as index:
            found = checksum(index.read())
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{index_path}: {error}"
        return
    if found != manifest.get("index_checksum"):
        yield f"{index_path}: it is not the one that {records.MANIFEST_FILE} was written for"
    # Everything in a manifest follows from the rest of the dataset.
    expected = json.loads(json.dumps(make_manifest(settings, units, skipped, found)))
    for name in sorted({*expected, *manifest} - {"index_checksum"}):
        yield from (
            f"{path}: {place} is {stored!r}, but the dataset has {right!r}"
            for place, stored, right in _differences(
                name, manifest.get(name, _ABSENT), expected.get(name, _ABSENT)
            )
        )


def _differences(place: str, stored: object, right: object) -> Iterator[tuple[str, object, object]]:
    """Yield each place where two values of JSON differ, with both parts."""
    if isinstance(stored, dict) and isinstance(right, dict):
        for name in {**right, **stored}:
            both = stored.get(name, _ABSENT), right.get(name, _ABSENT)
            yield from _differences(f"{place}.{name}", *both)
    elif isinstance(stored, list) and isinstance(right, list) and len(stored) == len(right):
        for number, (one, other) in enumerate(zip(stored, right, strict=True)):
            yield from _differences(f"{place}[{number}]", one, other)
    elif stored != right:
        yield place, stored, right


def _size_problem(path: str, expected: FileRecord) -> str | None:
    if not os.path.exists(path):
        return f"{path}: the file is missing"
    size = os.path.getsize(path)
    return None if size == expected.size else f"{path}: {size} bytes instead of {expected.size}"
