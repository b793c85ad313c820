"""Writers of a dataset, unit by unit.

A unit is written under temporary names, renamed, and committed by its record in ``units/``.
A process that ends before that leaves the committed units, and files that the next
writer of the unit replaces with the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

import numpy as np
import torch

from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states import metadata as records
from vllm.hidden_states.exporters import find_exporter
from vllm.hidden_states.metadata import DatasetSettings, FileRecord, SkippedRecord, UnitRecord
from vllm.hidden_states.positions import positions_fit
from vllm.hidden_states.sample import HiddenStatesError, HiddenStatesSample, in_dtype
from vllm.hidden_states.tensor_file import SpooledTensor, TensorFile, dtype_name
from vllm.utils.boundaries import LayerId
from vllm.utils.text import safe_name
from vllm.utils.whole_files import sync_path, temporary_path
from vllm.v1.rows.fields.activations import is_hook_name
from vllm.v1.rows.fields.checks import find_bad_row
from vllm.v1.rows.fields.fp8 import FP8, exact_rows, row_norms, row_parts
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

_Sums: TypeAlias = "npt.NDArray[np.float64]"
_LARGEST_GROUP_BYTES = 256 << 20
WHOLE_UNIT = ""
"""Key of the problems of a unit that belong to none of its files."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def plan_units(row_bytes: Iterable[int], unit_bytes: int) -> Iterator[range]:
    """Cut samples of ``row_bytes`` each into runs of at most ``unit_bytes``, or of one sample."""
    first, used, sample = 0, 0, -1
    for sample, size in enumerate(row_bytes):
        if sample > first and used + size > unit_bytes:
            yield range(first, sample)
            first, used = sample, 0
        used += size
    if sample >= 0:
        yield range(first, sample + 1)


def writer_of(fmt: str) -> type[UnitWriter]:
    """Return the class that writes the units of a format; raises ValueError if there is none."""
    own = {"sharded": _ShardWriter, "files": FileWriter}.get(fmt)
    return own or cast("type[UnitWriter]", find_exporter(fmt))


def cut_at(fmt: str, shard_bytes: int) -> int:
    """Return the most bytes of a unit: a shard, or a group of files that is committed at once."""
    return shard_bytes if writer_of(fmt).has_shards else min(shard_bytes, _LARGEST_GROUP_BYTES)


def file_stem(name: str) -> str:
    """Return the file name, without suffix, for a sample's name; safe names stay the same."""
    return name if _SAFE_NAME.fullmatch(name) else safe_name(name)


def find_repair(
    record: UnitRecord,
    samples: Sequence[int],
    problems: Collection[str],
    settings: DatasetSettings,
) -> list[int] | None:
    """Return those ``samples`` of a unit, which have a file each, whose files have ``problems``;
    None if all of it has to be written again."""
    has_shards = writer_of(settings.format).has_shards
    is_whole = has_shards or record.kernels != settings.kernels
    if is_whole or not problems or WHOLE_UNIT in problems or len(samples) != len(record.files):
        return None
    return [n for n, file in zip(samples, record.files, strict=True) if file.name in problems]


def open_unit_writer(
    directory: str, unit: int, settings: DatasetSettings, repaired: UnitRecord | None = None
) -> UnitWriter:
    """Return the writer of unit ``unit``; from here on the dataset is incomplete.

    repaired: the record of a unit of which only the samples that are appended change.
    """
    os.makedirs(os.path.join(directory, records.UNITS_FOLDER), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, records.MANIFEST_FILE))
    opened = writer_of(settings.format)(directory, unit, settings)
    opened.repaired = repaired
    return opened


class NewFile(Protocol):
    """A file that a unit is written to."""

    @property
    def path(self) -> str:
        """Its temporary path."""
        ...

    @property
    def header_checksum(self) -> str:
        """The checksum for its record: of the header, or of all of an exported file."""
        ...

    def discard(self) -> None:
        """Remove the file."""
        ...


class UnitWriter(ABC):
    """A writer of a unit's samples in order; a context manager that aborts unless committed.

    The file system's ``OSError`` (a full disk) is raised unchanged; after it, only :meth:`abort`
    may be called.
    """

    has_shards: ClassVar[bool] = False
    """True if the files of a unit hold many samples; otherwise each sample has a file."""
    takes_names: ClassVar[bool] = False
    """True if samples have names, which their files get."""
    stores_fields: ClassVar[bool] = True
    """True if it stores columns, and other tensors of a row than hidden states and loss mask."""
    stores_hooks: ClassVar[bool] = True
    """True if it stores values at hook points."""
    stores_loss_mask: ClassVar[bool] = True
    has_default_layers: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = tuple(STORAGE_DTYPES)
    """Dtypes of rows that the format can store; rows of another one become the first."""

    @classmethod
    def default_layers(cls, num_hidden_layers: int) -> Sequence[LayerId]:
        """Return the layers that ``vllm extract`` stores if none are named. Raises ValueError if
        the format has no such layers, or the model too few."""
        raise ValueError("layers: this format has no usual ones; name some, such as 2,12,last")

    @classmethod
    def stored_dtype(cls, dtype: str) -> str:
        """Return the dtype in which rows of ``dtype`` are stored by default."""
        return dtype if dtype in cls.dtypes else cls.dtypes[0]

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        """Return advice for the user of this dataset's format, if there is any. Raises ValueError
        with the reason, and with what would work, if the program it is for could not use it."""
        if settings.dtype in cls.dtypes:
            return None
        raise ValueError(
            f"format={settings.format} with dtype={settings.dtype}: it can store "
            f"{', '.join(cls.dtypes)}"
        )

    @classmethod
    def describe(
        cls, directory: str, settings: DatasetSettings, units: Sequence[UnitRecord]
    ) -> dict[str, bytes]:
        """Return the files, by name, that describe all units of a complete dataset."""
        return {}

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        self._directory = directory
        self.unit = unit
        self.repaired: UnitRecord | None = None
        """The record of the committed unit, if only some of its samples are written."""
        self._settings = settings
        self._samples: list[int] = []
        self._skipped: list[SkippedRecord] = []
        self._num_tokens = self._num_rows = 0
        self._norm_sums = np.zeros(len(settings.layer_ids))
        self._error_sums: _Sums | None = None
        self._files: dict[str, NewFile] = {}  # by final name

    def append(
        self,
        sample: HiddenStatesSample,
        sample_number: int,
        record_number: int,
        name: str | None = None,
    ) -> None:
        """Write the next sample; its rows are quantised if the dataset is fp8.

        ``name``: name of the sample's file, for the format ``files`` only.
        Raises HiddenStatesError if the sample is invalid; then nothing of it is written, and the
        caller may go on or skip it.
        """
        _check_form(sample, self._settings)
        stored = dataclasses.replace(sample, index=sample_number, record=record_number)
        stored = in_dtype(stored, self._settings.torch_dtype)
        stored = _with_forms(stored, self._settings)
        norms = _checked_norms(stored)
        if (refusal := self._refusal(stored)) is not None:
            self.skip(sample_number, record_number, f"format: {refusal}")
            return
        self._write(stored, name)
        self._samples.append(sample_number)
        self._num_tokens += len(stored.token_ids)
        self._num_rows += len(stored.positions)
        self._norm_sums += norms
        if stored.fp8_errors is not None:
            sums = stored.fp8_errors.numpy().sum(axis=0, dtype=np.float64)
            self._error_sums = sums if self._error_sums is None else self._error_sums + sums

    def skip(self, sample_number: int, record_number: int, reason: str) -> None:
        """Record that a sample is left out."""
        self._samples.append(sample_number)
        self._skipped.append(SkippedRecord(record_number, reason, sample_number))

    def commit(self) -> UnitRecord:
        """Put the unit on the disk for good, and return its record."""
        for file in self._files.values():
            sync_path(file.path)
        files = []
        for name, file in self._files.items():
            size = os.path.getsize(file.path)
            files.append(FileRecord(name, size, file.header_checksum))
            os.replace(file.path, os.path.join(self._directory, name))
        sync_path(self._directory)
        record = UnitRecord(
            unit=self.unit,
            first_sample=min(self._samples),
            last_sample=max(self._samples),
            num_samples=len(self._samples) - len(self._skipped),
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            files=tuple(files),
            skipped=tuple(self._skipped),
            row_norm_sums=tuple(self._norm_sums.tolist()),
            fp8_error_sums=None if self._error_sums is None else tuple(self._error_sums.tolist()),
            kernels=self._settings.kernels,
            settings_digest=self._settings.digest_of_unit(self.unit),
        )
        if self.repaired is not None:
            renewed = {file.name: file for file in files}
            kept = tuple(renewed.pop(file.name, file) for file in self.repaired.files)
            assert not renewed, f"{[*renewed]} are not in unit {self.unit}"
            record = dataclasses.replace(self.repaired, files=kept)
        path = records.unit_path(self._directory, self.unit)
        records.write_json(path, records.to_json(record), self.unit)
        return record

    def abort(self) -> None:
        """Remove files without a final name; after a commit there are none."""
        for file in self._files.values():
            file.discard()

    @abstractmethod
    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        """Write a sample that has the dataset's dtype and the numbers of sample and record."""

    def _refusal(self, stored: HiddenStatesSample) -> str | None:
        """Return the reason why the program that reads this format would refuse the sample."""
        return None

    def _temporary_path(self, name: str) -> str:
        """Return a new temporary path for a file of the unit."""
        if name in self._files:
            stem = os.path.splitext(name)[0]
            raise ValueError(f"two samples have the name {stem}; give each a different name")
        return temporary_path(os.path.join(self._directory, name), records.unit_name(self.unit))

    def _new_file(self, name: str, num_others: int, metadata: dict[str, str]) -> TensorFile:
        path = self._temporary_path(name)
        settings = self._settings
        row_shape = len(settings.layer_ids), settings.hidden_size
        metadata = {**settings.metadata, **metadata}
        dtype = settings.torch_dtype
        # A header has each name twice more than the metadata; short ones need no more room.
        long_names = [name for name in settings.request_tensors if is_hook_name(name)]
        name_bytes = sum(2 * len(json.dumps(name)) for name in long_names)
        file = TensorFile(path, "hidden_states", row_shape, dtype, num_others, metadata, name_bytes)
        self._files[name] = file
        return file

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class _ShardWriter(UnitWriter):
    """A writer of one file with the rows of all samples, one after another."""

    has_shards = True

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        super().__init__(directory, unit, settings)
        names = ["positions", "token_ids", "row_offsets", "token_offsets", "sample_index",
                 "record_index"]  # fmt: skip
        scales = ["scales"] if settings.dtype == "fp8" else []
        names += ["columns", "column_offsets"] if settings.has_columns else []
        names += [*settings.stored_names.tensors, *settings.stored_names.constants]
        self._columns: dict[str, list[torch.Tensor]] = {name: [] for name in scales + names}
        self._spooled = {
            name: SpooledTensor(directory, form)
            for name, form in settings.request_tensors.items()
            if is_hook_name(name)
        }
        for name in self._columns.keys() & {"row_offsets", "token_offsets", "column_offsets"}:
            self._columns[name].append(torch.zeros(1, dtype=torch.int64))
        self._file = self._new_file(f"shard-{unit:05d}.safetensors", len(self._columns), {})

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        if name is not None:
            raise ValueError(f"name={name!r}: samples in shards have no names")
        self._file.append(stored.hidden_states)
        parts = {
            "scales": stored.scales,
            "positions": stored.positions,
            "token_ids": stored.token_ids,
            "row_offsets": torch.tensor([self._file.num_rows]),
            "token_offsets": self._columns["token_offsets"][-1] + len(stored.token_ids),
            "sample_index": torch.tensor([stored.index]),
            "record_index": torch.tensor([stored.record]),
        }
        if self._settings.has_columns:
            columns = torch.frombuffer(_json_of(stored.columns), dtype=torch.uint8)
            offset = self._columns["column_offsets"][-1] + len(columns)
            parts |= {"columns": columns, "column_offsets": offset}
        tensors, constants = fields_of(stored, self._settings)
        # Constants are the same in all samples, so they are stored once.
        parts |= tensors | {name: c for name, c in constants.items() if not self._columns[name]}
        for column, part in parts.items():
            if part is None:
                continue
            if column in self._spooled:
                self._spooled[column].append(part)
            else:
                self._columns[column].append(part.clone())

    def commit(self) -> UnitRecord:
        empty = {"scales": torch.empty(0, len(self._settings.layer_ids))}
        others = {
            name: torch.cat(parts) if parts else empty.get(name, torch.empty(0, dtype=torch.int64))
            for name, parts in self._columns.items()
        }
        others |= {name: tensor.whole() for name, tensor in self._spooled.items()}
        self._file.complete(others)
        self._close()
        return super().commit()

    def abort(self) -> None:
        super().abort()
        self._close()

    def _close(self) -> None:
        for tensor in self._spooled.values():
            tensor.close()


class FileWriter(UnitWriter):
    """A writer of one file per sample, as the connector writes it."""

    takes_names = True

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        file_name = f"{self._stem(stored, name)}.safetensors"
        others = {"token_ids": stored.token_ids.contiguous()}
        if not self._settings.has_all_rows:
            others["positions"] = stored.positions.contiguous()
        tensors, constants = fields_of(stored, self._settings)
        others |= tensors | constants
        if stored.scales is not None:
            others["scales"] = stored.scales.contiguous()
        about = {"sample": str(stored.index), "record": str(stored.record)}
        if self._settings.has_columns:
            about["columns"] = _json_of(stored.columns).decode()
        file = self._new_file(file_name, len(others), about)
        file.append(stored.hidden_states)
        file.complete(others)

    def _stem(self, stored: HiddenStatesSample, name: str | None) -> str:
        return f"{stored.index:08d}" if name is None else file_stem(name)


def _with_forms(sample: HiddenStatesSample, settings: DatasetSettings) -> HiddenStatesSample:
    """Return the sample with the tensors of requests in the forms that the dataset has; raises
    HiddenStatesError if that cannot be, or it lacks a tensor."""
    changed = {}
    for name in settings.stored_names.tensors if len(sample.positions) else ():
        tensor, form = sample.tensors.get(name), settings.request_tensors.get(name)
        problem = None
        if tensor is None:
            problem = f"it has no {name}, which the dataset requires"
        elif form is not None:
            changed[name] = tensor.to(form.dtype)
            if tuple(tensor.shape[1:]) != form.shape:
                problem = f"its {name} have the shape {tuple(tensor.shape[1:])}, not {form.shape}"
            elif not torch.equal(tensor.isfinite(), changed[name].isfinite()):
                problem = f"its {name} are beyond the range of {dtype_name(form.dtype)}"
        if problem is not None:
            raise HiddenStatesError(sample.index, Failure(FailureKind.BAD_REQUEST, problem))
    return sample.with_tensors(**changed)


def fields_of(
    stored: HiddenStatesSample, settings: DatasetSettings
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of its tokens besides hidden states, and the constants; both are empty
    for a sample without rows."""
    names = settings.stored_names
    if not all(name in stored.tensors for name in names.tensors):
        return {}, {}
    tensors = {name: stored.tensors[name].contiguous() for name in names.tensors}
    return tensors, {name: torch.tensor(stored.constants[name]) for name in names.constants}


def _json_of(columns: Mapping[str, Any]) -> bytearray:
    return bytearray(json.dumps(dict(columns)).encode())


def _check_form(sample: HiddenStatesSample, settings: DatasetSettings) -> None:
    dtype = sample.hidden_states.dtype
    if settings.torch_dtype not in (dtype, FP8):
        raise ValueError(
            f"rows of {dtype_name(dtype)} for a dataset of {settings.dtype}; convert them"
        )
    shape = (len(sample.positions), len(settings.layer_ids), settings.hidden_size)
    if sample.layer_ids != settings.layer_ids or tuple(sample.hidden_states.shape) != shape:
        message = (
            f"rows of shape {tuple(sample.hidden_states.shape)} for layers {sample.layer_ids}; "
            f"the dataset has {shape} for layers {settings.layer_ids}"
        )
        raise HiddenStatesError(sample.index, Failure(FailureKind.BAD_REQUEST, message))
    num_rows, num_tokens = len(sample.positions), len(sample.token_ids)
    spans = torch.tensor([0, num_rows]), torch.tensor([0, num_tokens])
    are_all = num_rows == num_tokens or not settings.has_all_rows
    if not are_all or not positions_fit(sample.positions, *spans):
        message = f"its rows do not belong to ascending positions of {num_tokens} tokens"
        raise HiddenStatesError(sample.index, Failure(FailureKind.BAD_REQUEST, message))


def _checked_norms(sample: HiddenStatesSample) -> _Sums:
    """Return float64 [layers], the sum of the rows' norms, with the same bits for any number of
    threads."""
    values, scales = sample.hidden_states, sample.scales
    total = np.zeros(values.shape[1])
    for part in row_parts(values):
        rows = values[part], None if scales is None else scales[part]
        norms = row_norms(*rows)
        if not (torch.isfinite(norms) & (norms > 0)).all():
            exact = exact_rows(*rows)
            failure = find_bad_row(exact, sample.layer_ids, sample.positions[part].tolist())
            if failure is not None:
                raise HiddenStatesError(sample.index, failure)
            norms = torch.linalg.vector_norm(exact, dim=-1)
        total += norms.numpy().sum(axis=0, dtype=np.float64)
    return total
