"""Writing a dataset unit by unit.

A unit is written under temporary names, renamed, and committed by its record in ``units/``.
Whatever ends the process before that leaves the committed units, and files that the next
writer of the unit replaces by the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import safe_name
from vllm.hidden_states import records
from vllm.hidden_states.fp8 import FP8, quantization_errors, quantize_rows, row_norms, rows_at_once
from vllm.hidden_states.records import (
    DatasetFormat,
    DatasetHeader,
    FileRecord,
    SkippedRecord,
    UnitRecord,
)
from vllm.hidden_states.sample import HiddenStatesError, HiddenStatesSample
from vllm.hidden_states.tensor_file import TensorFile, dtype_name
from vllm.utils.row_checks import find_bad_row

_Sums = npt.NDArray[np.float64]
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


def open_unit_writer(
    directory: str, fmt: DatasetFormat, unit: int, header: DatasetHeader
) -> UnitWriter:
    """The writer of unit ``unit``. From here on the dataset is not complete."""
    os.makedirs(os.path.join(directory, records.UNITS_FOLDER), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, records.MANIFEST_FILE))
    if fmt == "sharded":
        return _ShardWriter(directory, unit, header)
    return _FileWriter(directory, unit, header, fmt)


class UnitWriter(ABC):
    """Takes the samples of a unit in order; a context manager that aborts unless committed.

    ``OSError`` of the file system (a full disk) comes through unchanged; only :meth:`abort`
    may follow.
    """

    def __init__(self, directory: str, unit: int, header: DatasetHeader) -> None:
        self._directory = directory
        self._unit = unit
        self._header = header
        self._samples: list[int] = []
        self._skipped: list[SkippedRecord] = []
        self._num_tokens = self._num_rows = 0
        self._norm_sums = np.zeros(len(header.layer_ids))
        self._error_sums: _Sums | None = None

    def append(
        self,
        sample: HiddenStatesSample,
        sample_number: int,
        record_number: int,
        name: str | None = None,
    ) -> None:
        """Write the next sample; rows that are not fp8 become so if the dataset is.

        ``name``: of the sample's file, where the format leaves the choice (``files``).
        HiddenStatesError: it cannot be right (nothing of it was written; go on, or skip it).
        """
        _check_shape(sample, self._header)
        values, scales, errors = _storage_form(sample, self._header.dtype)
        norms = _checked_norms(sample, values, scales)
        self._write(sample, values, scales, sample_number, record_number, name)
        self._samples.append(sample_number)
        self._num_tokens += len(sample.token_ids)
        self._num_rows += len(values)
        self._norm_sums += norms
        if errors is not None:
            sums = errors.numpy().sum(axis=0, dtype=np.float64)
            self._error_sums = sums if self._error_sums is None else self._error_sums + sums

    def skip(self, sample_number: int, record_number: int, reason: str) -> None:
        """Leave a sample out."""
        self._samples.append(sample_number)
        self._skipped.append(SkippedRecord(record_number, reason, sample_number))

    def commit(self) -> UnitRecord:
        """The unit is on the disk, and will not be written again."""
        files = self._finish()
        records.sync_folder(self._directory)
        record = UnitRecord(
            unit=self._unit,
            first_sample=min(self._samples),
            last_sample=max(self._samples),
            num_samples=len(self._samples) - len(self._skipped),
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            files=tuple(files),
            skipped=tuple(self._skipped),
            row_norm_sums=tuple(self._norm_sums.tolist()),
            fp8_error_sums=None if self._error_sums is None else tuple(self._error_sums.tolist()),
        )
        path = records.unit_path(self._directory, self._unit)
        records.write_json(path, records.to_json(record), self._unit)
        return record

    @abstractmethod
    def abort(self) -> None:
        """Remove what has no final name yet; nothing happens after a commit."""

    @abstractmethod
    def _write(
        self,
        sample: HiddenStatesSample,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        sample_number: int,
        record_number: int,
        name: str | None,
    ) -> None: ...

    @abstractmethod
    def _finish(self) -> list[FileRecord]:
        """Give every file its final name."""

    def _new_file(self, name: str, others: list[str], metadata: dict[str, str]) -> TensorFile:
        path = records.temporary_path(os.path.join(self._directory, name), self._unit)
        return TensorFile(
            path,
            "hidden_states",
            (len(self._header.layer_ids), self._header.hidden_size),
            self._header.dtype,
            others,
            {**self._header.metadata, **metadata},
        )

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


class _ShardWriter(UnitWriter):
    """One file with the rows of all samples, one after another."""

    def __init__(self, directory: str, unit: int, header: DatasetHeader) -> None:
        super().__init__(directory, unit, header)
        names = ["positions", "token_ids", "row_offsets", "token_offsets", "sample_index",
                 "record_index"]  # fmt: skip
        scales = ["scales"] if header.dtype == FP8 else []
        self._columns: dict[str, list[torch.Tensor]] = {name: [] for name in scales + names}
        for name in ("row_offsets", "token_offsets"):
            self._columns[name].append(torch.zeros(1, dtype=torch.int64))
        self._name = f"shard-{unit:05d}.safetensors"
        self._file = self._new_file(self._name, list(self._columns), {})

    def _write(
        self,
        sample: HiddenStatesSample,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        sample_number: int,
        record_number: int,
        name: str | None,
    ) -> None:
        if name is not None:
            raise ValueError(f"name={name!r}: samples in shards have no names")
        self._file.append(values)
        parts = {
            "positions": sample.positions,
            "token_ids": sample.token_ids,
            "row_offsets": torch.tensor([self._file.num_rows]),
            "token_offsets": self._columns["token_offsets"][-1] + len(sample.token_ids),
            "sample_index": torch.tensor([sample_number]),
            "record_index": torch.tensor([record_number]),
        }
        for column, part in (parts if scales is None else {**parts, "scales": scales}).items():
            self._columns[column].append(part.clone())

    def _finish(self) -> list[FileRecord]:
        empty = {"scales": torch.empty(0, len(self._header.layer_ids))}
        others = {
            name: torch.cat(parts) if parts else empty.get(name, torch.empty(0, dtype=torch.int64))
            for name, parts in self._columns.items()
        }
        found = self._file.complete(others)
        self._file.sync()
        self._file.close()
        path = os.path.join(self._directory, self._name)
        os.replace(self._file.path, path)
        return [FileRecord(self._name, os.path.getsize(path), found)]

    def abort(self) -> None:
        self._file.discard()


class _FileWriter(UnitWriter):
    """A file for each sample, as the connector writes it, or as speculators reads it."""

    def __init__(
        self, directory: str, unit: int, header: DatasetHeader, fmt: DatasetFormat
    ) -> None:
        super().__init__(directory, unit, header)
        self._format = fmt
        self._files: dict[str, tuple[TensorFile, str]] = {}
        """By final name: the file, and the checksum of its header."""

    def _write(
        self,
        sample: HiddenStatesSample,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        sample_number: int,
        record_number: int,
        name: str | None,
    ) -> None:
        stem = _stem(self._format, sample_number, record_number, name)
        others = {"token_ids": sample.token_ids.contiguous()}
        if not self._header.all_positions:
            others["positions"] = sample.positions.contiguous()
        if scales is not None:
            others["scales"] = scales.contiguous()
        numbers = {"sample": str(sample_number), "record": str(record_number)}
        file = self._new_file(f"{stem}.safetensors", list(others), numbers)
        if f"{stem}.safetensors" in self._files:
            file.discard()
            raise ValueError(f"two samples have the name {stem}; give each one of its own")
        self._files[f"{stem}.safetensors"] = (file, "")
        file.append(values)
        found = file.complete(others)
        file.close()
        self._files[f"{stem}.safetensors"] = (file, found)

    def _finish(self) -> list[FileRecord]:
        files = []
        for file, _ in self._files.values():
            _sync_path(file.path)
        for name, (file, found) in self._files.items():
            path = os.path.join(self._directory, name)
            os.replace(file.path, path)
            files.append(FileRecord(name, os.path.getsize(path), found))
        return files

    def abort(self) -> None:
        for file, _ in self._files.values():
            file.discard()


def _stem(fmt: DatasetFormat, sample_number: int, record_number: int, name: str | None) -> str:
    if fmt == "speculators":
        return f"hs_{record_number}"
    if name is None:
        return f"{sample_number:08d}"
    # A name that was made safe before stays as it is.
    return name if _SAFE_NAME.fullmatch(name) else safe_name(name)


def _sync_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_shape(sample: HiddenStatesSample, header: DatasetHeader) -> None:
    shape = (len(sample.positions), len(header.layer_ids), header.hidden_size)
    if sample.layer_ids != header.layer_ids or tuple(sample.hidden_states.shape) != shape:
        raise HiddenStatesError(
            sample.index,
            f"rows of shape {tuple(sample.hidden_states.shape)} for layers {sample.layer_ids}; "
            f"the dataset has {shape} for layers {header.layer_ids}",
        )
    tokens = torch.arange(len(sample.token_ids))
    fits = (
        torch.equal(sample.positions, tokens)
        if header.all_positions
        else torch.isin(sample.positions, tokens).all() and (sample.positions.diff() > 0).all()
    )
    if not fits:
        raise HiddenStatesError(
            sample.index, f"rows are not those of ascending positions of {len(tokens)} tokens"
        )


def _storage_form(
    sample: HiddenStatesSample, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Values, and for fp8 the scales and the errors (if they can be known)."""
    rows = sample.hidden_states
    if rows.dtype == dtype:
        return rows.contiguous(), sample.scales, sample.fp8_errors
    if dtype != FP8:
        raise ValueError(
            f"rows of {dtype_name(rows.dtype)} for a dataset of {dtype_name(dtype)}; convert them"
        )
    values, scales = quantize_rows(rows)
    return values, scales, quantization_errors(rows, values, scales)


def _checked_norms(
    sample: HiddenStatesSample, values: torch.Tensor, scales: torch.Tensor | None
) -> _Sums:
    """float64 [layers], the sum of the lengths of the rows. Same bits for any thread count."""
    step = rows_at_once(values.shape[1:])
    total = np.zeros(values.shape[1])
    for first in range(0, len(values), step):
        part = slice(first, first + step)
        part_scales = None if scales is None else scales[part]
        norms = row_norms(values[part], part_scales)
        if not (torch.isfinite(norms) & (norms > 0)).all():
            exact = values[part].double() * (1 if part_scales is None else part_scales[..., None])
            reason = find_bad_row(exact, sample.layer_ids, sample.positions[part].tolist())
            if reason is not None:
                raise HiddenStatesError(sample.index, reason)
            norms = torch.linalg.vector_norm(exact, dim=-1)
        total += norms.numpy().sum(axis=0, dtype=np.float64)
    return total
