"""Conversion of a dataset to another format, unit by unit, so that it can be resumed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from typing import cast

import torch

from vllm.hidden_states import metadata as records
from vllm.hidden_states.dataset import HiddenStatesDataset, SampleFile
from vllm.hidden_states.layer_ids import convention_of
from vllm.hidden_states.manifest import DatasetTotals, merge_units, read_skipped, start_dataset
from vllm.hidden_states.mapped_file import MappedFile, header_checksum
from vllm.hidden_states.metadata import MASK, DatasetSettings, UnitRecord
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import HiddenStatesError, HiddenStatesSample
from vllm.hidden_states.tensor_file import checksum, dtype_name, file_checksum
from vllm.hidden_states.units import (
    UnitWriter,
    cut_at,
    find_repair,
    open_unit_writer,
    plan_units,
    writer_of,
)
from vllm.hidden_states.verify import unit_problems
from vllm.logger import init_logger
from vllm.utils.disk import FILE_BYTES, check_room
from vllm.utils.regular_files import open_regular
from vllm.utils.whole_files import TemporaryName
from vllm.v1.rows.fields import BUILT_IN, LOSS_MASK, METADATA_KEYS, find_field
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES, HiddenStates

logger = init_logger(__name__)

_STATED = {"num_hidden_layers": "not stated", "positions": "all", "pooling": "none"}
"""Entries of the metadata that hold for all samples of a dataset, and what it means if a file has
none."""
_SEPARATE = "put files of each kind into folders of their own"

_ID_BYTES = 8
"""Bytes of a token id or a position."""
_IDS_OF_A_SAMPLE = 4
"""Numbers per sample in a shard: sample, record, row offset, token offset."""


def convert_dataset(
    source: str,
    destination: str,
    fmt: str,
    dtype: str | None = None,
    shard_bytes: int = 1 << 30,
    check_disk: bool = True,
) -> DatasetTotals:
    """Write the samples of ``source`` to ``destination``; a second call resumes the first.

    dtype: one of ``STORAGE_DTYPES``; by default the stored one, so that nothing is lost.
    Raises ValueError, before writing, if the source is incomplete or cannot have that format (says
    why), the destination holds something else, or (``check_disk``) its disk has no room.
    """
    if os.path.realpath(source) == os.path.realpath(destination):
        raise ValueError(f"DST {destination}: use a different folder from SRC")
    stored = HiddenStatesDataset(source, dtype=None)
    source_settings = stored.settings or _settings_of_folder(stored)
    writer = writer_of(fmt)
    if (dtype or source_settings.dtype) not in STORAGE_DTYPES:
        known = ", ".join(STORAGE_DTYPES)
        raise ValueError(
            f"{source}: rows of {dtype or source_settings.dtype} cannot be stored; use a dtype of "
            f"{known}"
        )
    is_chosen, dtype = dtype is not None, dtype or writer.stored_dtype(source_settings.dtype)
    note = writer.check(dataclasses.replace(source_settings, format=fmt, dtype=dtype))
    if note is not None:
        logger.warning("%s: %s", destination, note)
    if fmt == "speculators":
        _check_records(stored)
    if stored.settings is None:
        _check_nothing_is_lost(stored, source_settings, writer)
        if not is_chosen:
            _check_dtypes(stored, dtype)
    skipped = read_skipped(source) if stored.settings else []
    _check_is_ours(destination)
    same = dtype == source_settings.dtype
    # For a conversion to fp8, rows are read as stored; the writer quantises and measures errors.
    read_as = None if dtype == "fp8" and not same else STORAGE_DTYPES[dtype]
    dataset = HiddenStatesDataset(source, dtype=read_as, verify="first_read")
    row_bytes = len(dataset.layer_ids) * dataset.hidden_size * STORAGE_DTYPES[dtype].itemsize
    row_bytes += source_settings.request_bytes
    sizes = (dataset.num_rows(index) * row_bytes for index in range(len(dataset)))
    units = list(plan_units(sizes, cut_at(fmt, shard_bytes)))
    has_loss_mask = source_settings.has_loss_mask and writer.stores_loss_mask
    settings = dataclasses.replace(
        source_settings.with_plan(len(units), len(dataset), has_loss_mask),
        format=fmt,
        dtype=dtype,
        shard_bytes=shard_bytes,
        input_digest=_digest(stored),
        origin=source_settings,
        added=(),
    )
    if check_disk:
        _check_disk(dataset, units, destination, settings)
    committed = {unit.unit: unit for unit in start_dataset(destination, settings)}
    records.remove_temporary_files(destination)
    for unit, samples in enumerate(units):
        record = committed.get(unit)
        problems = {} if record is None else unit_problems(destination, record, full=True)
        again = None if record is None else find_repair(record, samples, problems, settings)
        if again is not None:
            _write_unit(dataset, again, destination, unit, settings, record)
        elif record is None or problems:
            _write_unit(dataset, samples, destination, unit, settings)
        dataset.unmap()
    return merge_units(destination, skipped)


def _check_records(dataset: HiddenStatesDataset) -> None:
    """Raise ValueError unless each sample has the number of a record of its own."""
    seen: dict[int, int] = {}
    for number in range(len(dataset)):
        sample = dataset.stored(number)
        problem = None
        if sample.record is None:
            problem = f"the record number of {sample.request_id!r} is not stored"
        elif (other := seen.setdefault(sample.record, number)) != number:
            problem = f"samples {other} and {number} are both of record {sample.record}"
        if problem is not None:
            raise ValueError(
                f"{dataset.path}: {problem}, so the file that speculators looks for cannot be named"
            )


def _check_is_ours(destination: str) -> None:
    """Raise ValueError if something else than an earlier conversion is in the folder."""
    if not os.path.exists(destination):
        return
    names = os.listdir(destination) if os.path.isdir(destination) else ["a file"]
    others = [name for name in names if TemporaryName.parse(name) is None]
    if others and records.SETTINGS_FILE not in names:
        raise ValueError(
            f"DST {destination}: it contains something else ({min(others)}); use an empty folder"
        )


def _check_disk(
    dataset: HiddenStatesDataset, units: list[range], destination: str, settings: DatasetSettings
) -> None:
    """Raise ValueError if the units that are still to be written do not fit on the disk."""
    committed = {record.unit for record in records.read_unit_records(destination)}
    todo = [unit for number, unit in enumerate(units) if number not in committed]
    samples = [number for unit in todo for number in unit]
    has_shards = writer_of(settings.format).has_shards
    needed = FILE_BYTES * (len(todo) if has_shards else len(samples))
    for sample in samples:
        needed += dataset.num_rows(sample) * (settings.row_bytes + _ID_BYTES)  # with its position
        needed += (dataset.num_tokens(sample) + _IDS_OF_A_SAMPLE) * _ID_BYTES
    check_room("DST", destination, needed, "or --dtype fp8; use --no-check-disk to continue")


def _write_unit(
    dataset: HiddenStatesDataset, samples: Sequence[int], destination: str, unit: int,
    settings: DatasetSettings, repaired: UnitRecord | None = None,
) -> None:  # fmt: skip
    had_names = dataset.settings is None or dataset.settings.format == "files"
    named = had_names and writer_of(settings.format).takes_names
    with open_unit_writer(destination, unit, settings, repaired) as writer:
        for number in samples:
            sample = dataset[number]
            if settings.has_loss_mask and sample.loss_mask is None:  # of a plain folder
                every = torch.ones(len(sample.positions), dtype=torch.bool)
                sample = sample.with_tensors(**{LOSS_MASK: every})
            record = sample.index if sample.record is None else sample.record
            # Files that were put together may state the numbers of several datasets.
            index = number if dataset.settings is None else sample.index
            try:
                writer.append(sample, index, record, sample.request_id if named else None)
            except HiddenStatesError as error:
                what = f"sample {number} {sample.request_id}".rstrip()
                raise ValueError(f"{dataset.path}: {what}: {error.reason}") from error
        writer.commit()


def _settings_of_folder(dataset: HiddenStatesDataset) -> DatasetSettings:
    """Return the settings of a plain folder of files, as the first file states them; masks and
    columns, which samples may lack, of any file."""
    if not dataset.layer_ids:
        raise ValueError(
            f"{dataset.path}: its files do not say which layers they have, so a dataset made from "
            "them could not say it either"
        )
    first = MappedFile(dataset.file_paths[0])
    metadata = first.metadata
    deepest = max((one for one in dataset.layer_ids if isinstance(one, int)), default=0)
    num_hidden_layers = int(metadata.get("num_hidden_layers", deepest))
    if "num_hidden_layers" not in metadata:
        logger.warning(
            "%s: its files do not say how many layers the model has; assuming %d",
            dataset.path,
            num_hidden_layers,
        )
    files = [SampleFile(path) for path in dataset.file_paths]
    stated = [file.metadata for file in files]
    models = sorted(
        {" with ".join(one[k] for k in ("model", "adapter") if k in one) for one in stated}
    )
    if len(models) > 1:
        logger.warning("%s: its files are of several models: %s", dataset.path, ", ".join(models))
    stored = first.tensor("hidden_states", 0, 1).dtype
    has_columns = any("columns" in file.metadata or file.columns(0) for file in files)
    options = {"keep_columns": "[]"} if has_columns else {}
    rule = next((one[MASK] for one in stated if MASK in one), None)
    options |= {} if rule is None else {MASK: json.dumps(rule)}
    options |= {
        option: "true"
        for option, field in BUILT_IN.items()
        if set(find_field(field).tensor_names) <= first.names
    }
    others = [json.loads(metadata.get(key, "[]")) for key in METADATA_KEYS]
    others[0] = [name for name in others[0] if name != LOSS_MASK]
    has_loss_mask = any(LOSS_MASK in json.loads(one.get(METADATA_KEYS[0], "[]")) for one in stated)
    if any(others):
        options[records.ROW_TENSORS] = json.dumps(others)
    settings = DatasetSettings(
        model=metadata.get("model", ""),
        layer_ids=dataset.layer_ids,
        num_hidden_layers=num_hidden_layers,
        hidden_size=dataset.hidden_size,
        dtype="fp8" if stored == FP8 else dtype_name(stored),
        positions=metadata.get("positions", "all"),
        format="files",
        shard_bytes=0,
        num_units=0,
        num_samples=0,
        input_digest="",
        options=options,
        pooling=cast("Pooling", metadata.get("pooling", "none")),
        engine_version=metadata.get("engine_version", ""),
        convention=convention_of(dataset.layer_ids),
    )
    return settings.with_plan(1, len(dataset), has_loss_mask)


def _check_nothing_is_lost(
    folder: HiddenStatesDataset, settings: DatasetSettings, writer: type[UnitWriter]
) -> None:
    """Raise ValueError if a file of a plain folder has tensors that the first one lacks, so that
    ``settings`` do not know them, or another form of them."""
    known = {*HiddenStates.tensor_names, *itertools.chain(*settings.stored_names)}
    forms: dict[str, tuple[str, str]] = {}  # by name, with the file that has it
    for index, path in enumerate(folder.file_paths):
        sample = folder.stored(index)
        more = {*sample.tensors, *sample.constants} - known - {LOSS_MASK}
        if more and writer.stores_fields:
            raise ValueError(
                f"{path} has {', '.join(sorted(more))}, which "
                f"{os.path.basename(folder.file_paths[0])} lacks, so a dataset of both would be "
                f"without: {_SEPARATE}"
            )
        for name, form in _forms(path, sample, writer).items():
            other, owner = forms.setdefault(name, (form, os.path.basename(path)))
            if form != other:
                raise ValueError(
                    f"{path} has {name} {form}, but {owner} has {other}, and a dataset has one of "
                    f"them: {_SEPARATE}"
                )


def _forms(path: str, sample: HiddenStatesSample, writer: type[UnitWriter]) -> dict[str, str]:
    """Return what is the same in all files of a dataset, by its name."""
    metadata = MappedFile(path).metadata
    forms = {name: metadata.get(name, default) for name, default in _STATED.items()}
    forms |= {"the rule of masks": metadata[MASK]} if MASK in metadata else {}
    if not writer.stores_fields:
        return forms
    for name, tensor in sample.other_tensors.items():
        forms[name] = f"{dtype_name(tensor.dtype)} {list(tensor.shape[1:])}"
    return forms | {name: str([*values]) for name, values in sample.constants.items()}


def _check_dtypes(folder: HiddenStatesDataset, dtype: str) -> None:
    """Raise ValueError if a file has rows that ``dtype``, which follows from the first one, would
    round."""
    first, target = None, STORAGE_DTYPES[dtype]
    for index, path in enumerate(folder.file_paths):
        found = folder.stored(index).hidden_states.dtype
        first = first or found
        is_kept = found == FP8 or (target != FP8 and torch.promote_types(found, target) == target)
        if found != first and not is_kept:
            raise ValueError(
                f"{path} has rows of {dtype_name(found)}, which {dtype} would round: it follows "
                f"from {os.path.basename(folder.file_paths[0])}; choose one with --dtype"
            )


def _digest(dataset: HiddenStatesDataset) -> str:
    """Return the digest of everything in the source: its manifest, or the headers of its files, or
    all bytes of files whose headers have no checksums."""
    if dataset.manifest is not None:
        with open_regular(os.path.join(dataset.path, records.MANIFEST_FILE)) as file:
            return checksum(file.read())
    paths = dataset.file_paths
    return checksum("".join(header_checksum(one) or file_checksum(one) for one in paths).encode())
