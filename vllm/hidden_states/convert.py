"""Conversion of a dataset to another format, unit by unit, so that it can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import cast

import torch

from vllm.hidden_states import metadata as records
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.layer_ids import convention_of
from vllm.hidden_states.manifest import DatasetTotals, merge_units, read_skipped, start_dataset
from vllm.hidden_states.mapped_file import MappedFile
from vllm.hidden_states.metadata import MASK, DatasetSettings, UnitRecord
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import HiddenStatesError
from vllm.hidden_states.tensor_file import checksum, dtype_name
from vllm.hidden_states.units import cut_at, find_repair, open_unit_writer, plan_units, writer_of
from vllm.hidden_states.verify import unit_problems
from vllm.logger import init_logger
from vllm.utils.disk import FILE_BYTES, check_room
from vllm.utils.regular_files import open_regular
from vllm.utils.whole_files import TemporaryName
from vllm.v1.rows.fields import (
    BUILT_IN,
    LOSS_MASK,
    METADATA_KEYS,
    StoredNames,
    find_field,
)
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES

logger = init_logger(__name__)

_COLUMNS = "columns"
"""Metadata of a file that has columns."""
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
    dtype = dtype or writer.stored_dtype(source_settings.dtype)
    note = writer.check(dataclasses.replace(source_settings, format=fmt, dtype=dtype))
    if note is not None:
        logger.warning("%s: %s", destination, note)
    for sample in stored if fmt == "speculators" and stored.settings is None else ():
        if sample.record is None:
            raise ValueError(
                f"{source}: the record number of {sample.request_id!r} is not stored, so the file "
                "that speculators looks for cannot be named"
            )
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
            try:
                writer.append(sample, sample.index, record, sample.request_id if named else None)
            except HiddenStatesError as error:
                what = f"sample {number} {sample.request_id}".rstrip()
                raise ValueError(f"{dataset.path}: {what}: {error.reason}") from error
        writer.commit()


def _settings_of_folder(dataset: HiddenStatesDataset) -> DatasetSettings:
    """Return the settings of a plain folder of files, as the first file states them."""
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
    stored = first.tensor("hidden_states", 0, 1).dtype
    kept, rules = _kept_in(dataset)
    options = {"keep_columns": "[]"} if _COLUMNS in kept else {}
    options |= {MASK: json.dumps(*rules)} if len(rules) == 1 else {}
    options |= {
        option: "true"
        for option, field in BUILT_IN.items()
        if set(find_field(field).tensor_names) <= first.names
    }
    others = [json.loads(metadata.get(key, "[]")) for key in METADATA_KEYS]
    others[0] = [name for name in others[0] if name != LOSS_MASK]
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
    return settings.with_plan(1, len(dataset), LOSS_MASK in kept)


def _kept_in(dataset: HiddenStatesDataset) -> tuple[set[str], set[str]]:
    """Return what the files of a plain folder keep besides hidden states, and the rules by which
    their masks were made. Raises ValueError if a later file has tensors that the first lacks."""
    kept: set[str] = set()
    rules: set[str] = set()
    for number, path in enumerate(dataset.file_paths):
        file = MappedFile(path)
        names = {*StoredNames.in_file(file.metadata).tensors} & file.names
        if number and (more := sorted(names - kept - {LOSS_MASK})):
            raise ValueError(
                f"{path}: it has {', '.join(more)}, and {dataset.file_paths[0]} does not, so the "
                "dataset would have no place for it; convert files with the same tensors together"
            )
        kept |= {*names, *file.metadata.keys() & {_COLUMNS}}
        rules |= {file.metadata[MASK]} if MASK in file.metadata else set()
    return kept, rules


def _digest(dataset: HiddenStatesDataset) -> str:
    """Return the digest of everything in the source: its manifest, or the headers of its files."""
    if dataset.manifest is not None:
        with open_regular(os.path.join(dataset.path, records.MANIFEST_FILE)) as file:
            return checksum(file.read())
    headers = "".join(MappedFile(path).header_checksum for path in dataset.file_paths)
    return checksum(headers.encode())
