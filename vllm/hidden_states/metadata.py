"""The metadata of a dataset: settings, the records of its units, the index.

All of it is JSON without times or names of machines, so the same input gives the same bytes.
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
from typing import Any

import msgspec
import torch

from vllm.hidden_states.layer_ids import CONVENTION
from vllm.hidden_states.names import REQUEST_OPTIONS, Pooling
from vllm.hidden_states.tensor_file import checksum, dtype_name
from vllm.utils.boundaries import LayerId
from vllm.utils.regular_files import open_regular
from vllm.utils.text import parse_json
from vllm.utils.whole_files import remove_temporary, write_whole
from vllm.v1.rows.fields import BUILT_IN, LOSS_MASK, StoredNames, find_field
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES
from vllm.v1.rows.fields.layout import TensorForm
from vllm.version import __version__

SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"
MANIFEST_FILE = "manifest.json"
UNITS_FOLDER = "units"
MOST_JSON_BYTES = 2**31
"""A larger file was not written by this engine."""
_CHECKSUM = "checksum"
ROW_TENSORS = "row_tensors"
"""Name of the option that lists tensors and constants of fields that are not built in."""
MASK = "mask"
"""Name of the option, and in the metadata of files, of the rule of loss masks."""
REQUEST_TENSORS = "request_tensors"
"""Name of the option that lists the tensors for which requests ask, with their forms."""
_HAS_LOSS_MASK = "has_loss_mask"
_KERNELS = "kernels"
_SET_BY = {
    "dtype": "--storage-dtype",
    "max_tokens": "--max-length",
    "shard_bytes": "--shard-size-gib",
}
"""Flags of settings whose names do not tell them."""
_MAY_BE_UNKNOWN = (
    _KERNELS,
    "weights_content",
    "weights_sampled",  # of older datasets, instead of weights_content
    "weight_index",
    "sampling.eos_token_ids",
)
"""Options that older or newer datasets lack; differences count only if both datasets have them."""
_OF_OLDER_DATASETS = {"values_version": "1"}
"""Values of options for older datasets, which do not state them."""
_RESTORE = "restore it from a copy, or use another folder"


@dataclass(frozen=True)
class FileRecord:
    """A file of a dataset; ``checksum`` covers its header, which holds those of its tensors."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class SkippedRecord:
    """A record left out; ``sample`` is its number in the dataset, None if planning left it out."""

    record: int
    reason: str
    sample: int | None = None


@dataclass(frozen=True)
class UnitRecord:
    """A committed unit: the samples [first_sample, last_sample] except the skipped ones."""

    unit: int
    first_sample: int
    last_sample: int
    num_samples: int
    num_tokens: int
    num_rows: int
    files: tuple[FileRecord, ...]
    skipped: tuple[SkippedRecord, ...]
    row_norm_sums: tuple[float, ...]
    """Sum of the rows' norms, for each layer."""
    fp8_error_sums: tuple[float, ...] | None
    """Sum of the rows' relative errors in fp8, for each layer; None if not measured."""
    kernels: str = ""
    """The kernels that computed the rows; empty if written by a version that did not say."""
    settings_digest: str = ""
    """The :meth:`DatasetSettings.digest_of_unit` of the run that made it; empty as above."""


@dataclass(frozen=True)
class AddedInput:
    """An input whose records were added to a dataset, and the place where they begin."""

    input_digest: str
    first_unit: int = 0
    first_sample: int = 0
    first_record: int = 0


@dataclass(frozen=True)
class DatasetSettings:
    """Everything that the bytes of a dataset depend on; stored as ``settings.json``."""

    model: str
    layer_ids: tuple[LayerId, ...]
    num_hidden_layers: int
    hidden_size: int
    dtype: str
    """One of ``STORAGE_DTYPES``."""
    positions: str
    format: str
    """One of ``exporters.format_names()``."""
    shard_bytes: int
    num_units: int
    num_samples: int
    """The planned number; samples that fail are skipped."""
    input_digest: str
    revision: str = ""
    config_digest: str = ""
    tokenizer_digest: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """Other options that the bytes depend on: the reading, cutting and shuffling of the input."""
    origin: DatasetSettings | None = None
    """Settings of the dataset that this one was converted from."""
    pooling: Pooling = "none"
    """Unless "none", a sample has one row: the mean of those at ``positions``, or the last."""
    convention: str = CONVENTION
    engine_version: str = __version__
    added: tuple[AddedInput, ...] = ()
    """Inputs that were added after the one of ``input_digest``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the rows in the files."""
        return STORAGE_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all layers, with its scales and the tensors of requests."""
        scale_bytes = 4 if self.dtype == "fp8" else 0
        layer_bytes = self.hidden_size * self.torch_dtype.itemsize + scale_bytes
        return len(self.layer_ids) * layer_bytes + self.request_bytes

    @cached_property
    def request_tensors(self) -> dict[str, TensorForm]:
        """Forms of the stored tensors for which requests ask, such as log-probabilities."""
        stated = json.loads(self.options.get(REQUEST_TENSORS, "{}"))
        return {
            name: TensorForm(getattr(torch, dtype), tuple(shape))
            for name, (dtype, shape) in stated.items()
        }

    @property
    def request_bytes(self) -> int:
        """Bytes of a token's part of these tensors."""
        return sum(form.num_bytes for form in self.request_tensors.values())

    @property
    def request_options(self) -> dict[str, Any]:
        """Options of the requests that give these tensors, by their names in ``extract()``."""
        named = (name for name in REQUEST_OPTIONS if name in self.options)
        return {name: json.loads(self.options[name]) for name in named}

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that every file carries."""
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
            **({MASK: self.mask_rule} if self.mask_rule else {}),
            **self.stored_names.metadata,
        }

    @property
    def has_columns(self) -> bool:
        """True if samples carry columns: of their records, or about their making."""
        names = ("keep_columns", "split_turns", "pack", "sampling")
        return any(name in self.options for name in names)

    @property
    def mask_rule(self) -> str:
        """The rule that masks of conversations were made by; empty if there are no masks."""
        if "sampling" in self.options:
            return "generated tokens" if self.has_loss_mask else ""
        is_used = self.has_loss_mask or self.positions == "mask"
        return str(json.loads(self.options.get(MASK, '"answers"'))) if is_used else ""

    @cached_property
    def stored_names(self) -> StoredNames:
        """Names of the tensors and constants that samples carry besides hidden states."""
        built_in = [find_field(BUILT_IN[name]) for name in BUILT_IN if name in self.options]
        others = json.loads(self.options.get(ROW_TENSORS, "[[], []]"))
        more = [*[LOSS_MASK] * self.has_loss_mask, *self.request_tensors]
        return StoredNames.of(built_in).plus(more, ()).plus(*others)

    @property
    def has_loss_mask(self) -> bool:
        """True if samples carry their loss masks."""
        return _HAS_LOSS_MASK in self.options

    @property
    def selection(self) -> str:
        """The rows of a sample: the positions, with the pooling if there is one."""
        return self.positions if self.pooling == "none" else f"{self.pooling} of {self.positions}"

    @property
    def has_all_rows(self) -> bool:
        """True if there is a row for each token, so that positions need not be stored."""
        return self.selection == "all"

    @property
    def inputs(self) -> tuple[AddedInput, ...]:
        """All inputs, in the order of their samples."""
        return AddedInput(self.input_digest), *self.added

    def of_input(self, digest: str) -> DatasetSettings:
        """Return the settings for a plan of one input, which may begin in the middle."""
        (start,) = (one for one in self.inputs if one.input_digest == digest)
        added = (start,) if start.first_unit else ()
        return dataclasses.replace(self, input_digest=digest, added=added)

    def units_of(self, digest: str) -> range:
        """Return the units of one input; there are none before it is planned."""
        ends = [*(one.first_unit for one in self.added), self.num_units]
        (units,) = (
            range(one.first_unit, end)
            for one, end in zip(self.inputs, ends, strict=True)
            if one.input_digest == digest
        )
        return units

    def with_plan(self, num_units: int, num_samples: int, has_loss_mask: bool) -> DatasetSettings:
        """Return these settings with what only a plan, or an existing dataset, can tell."""
        options = {name: value for name, value in self.options.items() if name != _HAS_LOSS_MASK}
        options |= {_HAS_LOSS_MASK: "true"} if has_loss_mask else {}
        return dataclasses.replace(
            self, num_units=num_units, num_samples=num_samples, options=options
        )

    def like(self, stored: DatasetSettings) -> DatasetSettings:
        """Return these settings of one input with the plan and all inputs of ``stored``, an
        existing dataset, if the input is one of them."""
        mine = self.with_plan(stored.num_units, stored.num_samples, stored.has_loss_mask)
        if self.input_digest not in (one.input_digest for one in stored.inputs):
            return mine
        return dataclasses.replace(mine, input_digest=stored.input_digest, added=stored.added)

    @property
    def kernels(self) -> str:
        """The kernels that compute the rows; empty if not known."""
        return str(json.loads(self.options.get(_KERNELS, '""')))

    def with_kernels(self, kernels: str) -> DatasetSettings:
        """Return these settings for a machine that computes with ``kernels``."""
        options = {**self.options, _KERNELS: json.dumps(kernels)}
        return dataclasses.replace(self, options=options)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a plan is made from; with :data:`_MAY_BE_UNKNOWN` they are all
        that rows depend on.

        The path of a model is left out if there is a digest of its weights. So are the version of
        the engine, whose ``values_version`` changes when values do, and what follows from others.
        """
        settings = to_json(self)
        del settings["engine_version"]
        options = {**_OF_OLDER_DATASETS, **settings["options"]}
        left_out = (*_MAY_BE_UNKNOWN, REQUEST_TENSORS)
        settings["options"] = {k: v for k, v in options.items() if k not in left_out}
        if options.get("weights"):
            del settings["model"]
        return settings

    def digest_of_unit(self, unit: int) -> str:
        """Return a digest of all that the samples of a unit depend on, except the kernels: it
        stays the same when inputs are added after the unit's own."""
        identity = self.identity()
        for name in ("num_units", "num_samples", "added"):
            del identity[name]
        identity["options"].pop(_HAS_LOSS_MASK, None)
        before = [one.input_digest for one in self.inputs if one.first_unit <= unit]
        return _digest_of({**identity, "input_digest": before[-1]})

    def differences(self, other: DatasetSettings, *, mixes_kernels: bool = False) -> list[str]:
        """Return a line for each setting in which ``other`` differs, with this one's value first.

        mixes_kernels: other kernels may continue the dataset.
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
        advice = {name: f" ({flag})" for name, flag in _SET_BY.items()}
        advice[_KERNELS] = "; use --mixed-kernels to continue with rows that differ in last bits"
        return [
            f"{name}: {mine.get(name)!r} there, {others.get(name)!r} now{advice.get(name, '')}"
            for name in differing
            if name != _KERNELS or not mixes_kernels
        ]

    def write(self, directory: str) -> None:
        """Write ``settings.json`` atomically, with a checksum of all of it."""
        settings = to_json(self)
        settings[_CHECKSUM] = _digest_of(settings)
        write_json(os.path.join(directory, SETTINGS_FILE), settings)

    @staticmethod
    def read(directory: str) -> DatasetSettings:
        """Read the settings; raises ValueError if they are missing, unreadable or changed."""
        path = os.path.join(directory, SETTINGS_FILE)
        settings = read_json(path)
        try:
            written = settings.pop(_CHECKSUM, None)  # older datasets have none
            unknown = set(settings) - {one.name for one in dataclasses.fields(DatasetSettings)}
            if unknown:
                raise TypeError(f"{unknown.pop()!r} is not a setting")
            if written is None or written == _digest_of(settings):
                return msgspec.convert(settings, DatasetSettings)
        except (AttributeError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is damaged: {error}; {_RESTORE}") from None
        raise ValueError(f"{path} is damaged: its checksum does not match its content; {_RESTORE}")


def _digest_of(settings: dict[str, Any]) -> str:
    return checksum(json.dumps(settings, sort_keys=True).encode())


def to_json(value: DatasetSettings | UnitRecord | FileRecord | SkippedRecord) -> dict[str, Any]:
    """Return ``value`` in the types of JSON: lists instead of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value)))
    return plain


def read_json(path: str) -> Any:
    """Read a JSON file; raises ValueError if it is missing or is not JSON."""
    try:
        with open_regular(path, MOST_JSON_BYTES) as file:
            return parse_json(file.read().decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_json(path: str, value: object, unit: int | None = None) -> str:
    """Write a file that is whole or absent; returns its checksum.

    unit: the unit that the file belongs to, for :func:`remove_temporary_files`.
    """
    content = json_bytes(value) + b"\n"
    write_whole(path, content, None if unit is None else unit_name(unit))
    return checksum(content)


def json_bytes(value: object) -> bytes:
    """Return JSON in UTF-8. Half of a surrogate pair, which UTF-8 lacks, is escaped as in JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode(errors="backslashreplace")


def is_described(directory: str) -> bool:
    """Return whether ``settings.json`` is there; without it a folder may have plain files.

    ValueError: it was lost. A dataset would then pass for the files that are left of it.
    """
    if os.path.exists(os.path.join(directory, SETTINGS_FILE)):
        return True
    units = os.path.join(glob.escape(directory), UNITS_FOLDER, "unit-*.json")
    others = [UNITS_FOLDER] if glob.glob(units) else []
    for name, key in ((INDEX_FILE, "units"), (MANIFEST_FILE, "index_checksum")):
        with contextlib.suppress(ValueError, TypeError):  # not there, or of something else
            if key in read_json(os.path.join(directory, name)):
                others.append(name)
    if others:
        raise ValueError(
            f"{directory} is a dataset without {SETTINGS_FILE} ({others[0]} is there); {_RESTORE}"
        )
    return False


def unit_name(unit: int) -> str:
    """Return the name of a unit, which is also part of the names of its temporary files."""
    return f"unit-{unit:06d}"


def remove_temporary_files(directory: str, units: Collection[int] | None = None) -> None:
    """Remove the temporary files of an interrupted run; units: only the files of these.

    No process may be writing there, or none of these units.
    """
    owners = None if units is None else {unit_name(unit) for unit in units}
    for folder in (directory, os.path.join(directory, UNITS_FOLDER)):
        remove_temporary(folder, owners)


def unit_path(directory: str, unit: int) -> str:
    """Return the path of a unit's record."""
    return os.path.join(directory, UNITS_FOLDER, f"{unit_name(unit)}.json")


def read_unit_records(directory: str) -> list[UnitRecord]:
    """Return the committed units in order, from the index and the folder of units, which is newer.

    Records that cannot be read are left out.
    """
    newer: list[Any] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), UNITS_FOLDER, "*"))):
        with contextlib.suppress(ValueError):
            newer.append(read_json(path))
    entries: list[Any] = []
    # Read after the folder: a job that ends meanwhile writes the index, then removes the folder.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        entries += read_json(os.path.join(directory, INDEX_FILE))["units"]
    found = {}
    for entry in entries + newer:
        with contextlib.suppress(ValueError):
            unit = msgspec.convert(entry, UnitRecord)
            found[unit.unit] = unit
    return [found[unit] for unit in sorted(found)]
