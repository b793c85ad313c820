"""What is known of a dataset beside its rows: settings, the records of its units, the index.

All of it is JSON without times or names of machines: the same input gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
import torch

from vllm.hidden_states.layer_ids import CONVENTION
from vllm.hidden_states.sample import Pooling
from vllm.hidden_states.tensor_file import checksum, dtype_name
from vllm.utils.whole_files import remove_temporary, write_whole
from vllm.v1.rows.fields import BUILT_IN, StoredNames, find_field
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES
from vllm.version import __version__

DatasetFormat = Literal["sharded", "files", "speculators"]
FORMATS: tuple[DatasetFormat, ...] = get_args(DatasetFormat)

SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"
MANIFEST_FILE = "manifest.json"
UNITS_FOLDER = "units"
_CHECKSUM = "checksum"
ROW_TENSORS = "row_tensors"
"""Option: tensors and constants of fields from elsewhere."""
_KERNELS = "kernels"
_MAY_BE_UNKNOWN = (_KERNELS, "weights_sampled")
"""Options that older datasets do not state."""
_OF_OLDER_DATASETS = {"values_version": "1"}
"""Options of datasets that do not state them."""
_RESTORE = "restore it from a copy, or use another folder"


@dataclass(frozen=True)
class FileRecord:
    """``checksum`` is that of the file's header, which holds those of its tensors."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class SkippedRecord:
    """``sample``: its number in the dataset, or None if it was left out when planning."""

    record: int
    reason: str
    sample: int | None = None


@dataclass(frozen=True)
class UnitRecord:
    """A committed unit: the samples [first_sample, last_sample] but for the skipped ones."""

    unit: int
    first_sample: int
    last_sample: int
    num_samples: int
    num_tokens: int
    num_rows: int
    files: tuple[FileRecord, ...]
    skipped: tuple[SkippedRecord, ...]
    row_norm_sums: tuple[float, ...]
    """Sum of the lengths of the rows, for each layer."""
    fp8_error_sums: tuple[float, ...] | None
    """Sum of the rows' relative errors in fp8, for each layer, where they were measured."""
    kernels: str = ""
    """What computed the rows; empty: a version that did not say."""


@dataclass(frozen=True)
class DatasetSettings:
    """Everything that the bytes of a dataset depend on; ``settings.json``."""

    model: str
    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    hidden_size: int
    dtype: str
    """One of ``STORAGE_DTYPES``."""
    positions: str
    format: DatasetFormat
    shard_bytes: int
    num_units: int
    num_samples: int
    """As planned: some of them may turn out to fail, and are skipped."""
    input_digest: str
    revision: str = ""
    config_digest: str = ""
    tokenizer_digest: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """What else the bytes depend on: how the input was read, cut and shuffled."""
    origin: DatasetSettings | None = None
    """Of the dataset that this one was converted from."""
    pooling: Pooling = "none"
    """A sample has one row: the mean of those at ``positions``, or the last of them."""
    convention: str = CONVENTION
    engine_version: str = __version__

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows in the files."""
        return STORAGE_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Of a row of all layers, with its scales."""
        scale_bytes = 4 if self.dtype == "fp8" else 0
        return len(self.layer_ids) * (self.hidden_size * self.torch_dtype.itemsize + scale_bytes)

    @property
    def metadata(self) -> dict[str, str]:
        """What every file says of itself."""
        return {
            "model": self.model,
            "revision": self.revision,
            "layer_ids": json.dumps(self.layer_ids),
            "layer_convention": self.convention,
            "num_hidden_layers": str(self.num_hidden_layers),
            "positions": self.positions,
            "dtype": dtype_name(self.torch_dtype),
            "engine_version": self.engine_version,
            **({} if self.pooling == "none" else {"pooling": self.pooling}),
            **self.stored_names.metadata,
        }

    @property
    def has_columns(self) -> bool:
        """Samples carry columns of their records."""
        return "keep_columns" in self.options

    @cached_property
    def stored_names(self) -> StoredNames:
        """What samples carry of their tokens besides hidden states."""
        built_in = [find_field(BUILT_IN[name]) for name in BUILT_IN if name in self.options]
        others = json.loads(self.options.get(ROW_TENSORS, "[[], []]"))
        return StoredNames.of(built_in).plus(*others)

    @property
    def selection(self) -> str:
        """Which rows there are: the positions, or what is formed of their rows."""
        return self.positions if self.pooling == "none" else f"{self.pooling} of {self.positions}"

    @property
    def has_all_rows(self) -> bool:
        """A row for each token, so that positions need not be stored."""
        return self.selection == "all"

    def with_counts(self, num_units: int, num_samples: int) -> DatasetSettings:
        """These settings, for a plan of so many."""
        return dataclasses.replace(self, num_units=num_units, num_samples=num_samples)

    @property
    def kernels(self) -> str:
        """What computes the rows; empty: not known."""
        return str(json.loads(self.options.get(_KERNELS, '""')))

    def with_kernels(self, kernels: str) -> DatasetSettings:
        """These settings, on a machine where this computes."""
        options = {**self.options, _KERNELS: json.dumps(kernels)}
        return dataclasses.replace(self, options=options)

    def identity(self) -> dict[str, Any]:
        """What a plan is made from, and with :data:`_MAY_BE_UNKNOWN` what rows depend on.

        Where a model lies is not part of it if its weights were looked at; nor is the version of
        the engine, which says itself when values change (``values_version``).
        """
        settings = to_json(self)
        del settings["engine_version"]
        options = {**_OF_OLDER_DATASETS, **settings["options"]}
        settings["options"] = {k: v for k, v in options.items() if k not in _MAY_BE_UNKNOWN}
        if options.get("weights"):
            del settings["model"]
        return settings

    def differences(self, other: DatasetSettings, *, mixes_kernels: bool = False) -> list[str]:
        """A line for each setting in which ``other`` differs, this one's value first.

        mixes_kernels: other kernels may go on with the dataset.
        """
        mine, others = self.identity(), other.identity()
        mine |= mine.pop("options")
        others |= others.pop("options")
        for name in _MAY_BE_UNKNOWN:
            if name in self.options and name in other.options:
                mine[name], others[name] = self.options[name], other.options[name]
        if mixes_kernels:
            mine.pop(_KERNELS, None)
        differing = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
        advice = {_KERNELS: "; --mixed-kernels goes on, with rows that differ in their last bits"}
        return [
            f"{name}: {mine.get(name)!r} there, {others.get(name)!r} now{advice.get(name, '')}"
            for name in differing
            if name != _KERNELS or not mixes_kernels
        ]

    def write(self, directory: str) -> None:
        """Atomically, as ``settings.json``, with a checksum of all of it."""
        settings = to_json(self)
        settings[_CHECKSUM] = _digest_of(settings)
        write_json(os.path.join(directory, SETTINGS_FILE), settings)

    @staticmethod
    def read(directory: str) -> DatasetSettings:
        """ValueError: there are none, they cannot be read, or they are not as written."""
        path = os.path.join(directory, SETTINGS_FILE)
        settings = read_json(path)
        try:
            written = settings.pop(_CHECKSUM, None)  # older datasets have none
            unknown = set(settings) - {one.name for one in dataclasses.fields(DatasetSettings)}
            if unknown:
                raise TypeError(f"{unknown.pop()!r} is no setting")
            if written is None or written == _digest_of(settings):
                return msgspec.convert(settings, DatasetSettings)
        except (AttributeError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is damaged: {error}; {_RESTORE}") from None
        raise ValueError(f"{path} is damaged: its checksum is that of other content; {_RESTORE}")


def _digest_of(settings: dict[str, Any]) -> str:
    return checksum(json.dumps(settings, sort_keys=True).encode())


def to_json(value: DatasetSettings | UnitRecord | FileRecord | SkippedRecord) -> dict[str, Any]:
    """As JSON has it: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value)))
    return plain


def read_json(path: str) -> Any:
    """ValueError: the file is missing, or is not JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_json(path: str, value: object, unit: int | None = None) -> str:
    """Write a file that is whole or absent; returns its checksum.

    unit: the unit that the file belongs to, for :func:`remove_temporary_files`.
    """
    content = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    write_whole(path, content, None if unit is None else unit_name(unit))
    return checksum(content)


def unit_name(unit: int) -> str:
    """Name of a unit, among others in the names of its temporary files."""
    return f"unit-{unit:06d}"


def remove_temporary_files(directory: str, units: Collection[int] | None = None) -> None:
    """Remove what an interrupted run left; units: only what it left of these.

    Nothing may be writing there, or nothing that belongs to these units.
    """
    owners = None if units is None else {unit_name(unit) for unit in units}
    for folder in (directory, os.path.join(directory, UNITS_FOLDER)):
        remove_temporary(folder, owners)


def unit_path(directory: str, unit: int) -> str:
    """Where the record of a unit is."""
    return os.path.join(directory, UNITS_FOLDER, f"{unit_name(unit)}.json")


def read_unit_records(directory: str) -> list[UnitRecord]:
    """The committed units in order, from the index and, newer, the folder of units.

    A record that cannot be read counts as none.
    """
    newer: list[Any] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), UNITS_FOLDER, "*"))):
        with contextlib.suppress(ValueError):
            newer.append(read_json(path))
    entries: list[Any] = []
    # After the folder: a job that ends meanwhile writes the index before it removes the folder.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        entries += read_json(os.path.join(directory, INDEX_FILE))["units"]
    found = {}
    for entry in entries + newer:
        with contextlib.suppress(ValueError):
            unit = msgspec.convert(entry, UnitRecord)
            found[unit.unit] = unit
    return [found[unit] for unit in sorted(found)]
