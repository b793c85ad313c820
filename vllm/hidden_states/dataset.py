"""A reader of datasets of hidden states, of any format, in any order."""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, cast, overload

import torch
from torch.utils.data import Dataset

from vllm.hidden_states import metadata as records
from vllm.hidden_states.batches import RowBatch, join, part_of, rows_of, shuffled
from vllm.hidden_states.manifest import index_is_sound, read_manifest
from vllm.hidden_states.mapped_file import DamagedFileError, MappedFile
from vllm.hidden_states.metadata import DatasetSettings, FileRecord, read_unit_records
from vllm.hidden_states.names import FORMATS, NUM_GENERATED
from vllm.hidden_states.positions import flat_array
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.utils.boundaries import LayerId
from vllm.utils.text import check_truth_values
from vllm.v1.rows.fields import LOSS_MASK, StoredNames
from vllm.v1.rows.fields.fp8 import FP8

_MAPPED_FILES = 64
"""Number of files that a process keeps mapped for one dataset."""
_NUMBERS = re.compile(r"(\d+)")
_NUM_PROMPT = "num_prompt_tokens"
SAFETENSORS = ".safetensors"
NO_FILES = "there is no dataset and no *.safetensors file"


class HiddenStatesDataset(Dataset[HiddenStatesSample]):
    """The samples of a folder that ``vllm extract`` or the connector filled.

    ``ds[i]`` maps the file and returns views of it if the dtype is the stored one; a slice and a
    list of numbers return a dataset of those samples, and the name of a column that was kept the
    list of its values. A dataset can be pickled, and shared with forked and spawned workers.

    dtype: dtype of the rows; by default the stored one, and bfloat16 for fp8.
    ``torch.float8_e4m3fn`` gives the stored values of an fp8 dataset with their scales.
    verify: ``first_read`` compares a file with its checksums when it is first needed.
    allow_incomplete: open the finished part of a dataset that is still being made.

    Raises ValueError if there is no dataset, it is incomplete (says what is missing), or damaged.
    """

    layer_ids: tuple[LayerId, ...]
    """Layer ids of the slots of a row; empty if the files do not say."""
    hidden_size: int
    manifest: dict[str, Any] | None
    """The content of manifest.json; None for a plain folder and an incomplete dataset."""
    settings: DatasetSettings | None
    """None for a plain folder of files."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        verify: Literal["none", "first_read"] = "none",
        *,
        allow_incomplete: bool = False,
    ) -> None:
        check_truth_values(allow_incomplete=allow_incomplete)
        if verify not in ("none", "first_read"):
            raise ValueError(f"verify={verify!r}: use 'none' or 'first_read'")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype!r}: use a torch dtype, such as torch.float32, or None")
        self.path = os.fspath(path)
        self.manifest = self.settings = None
        self._dtype = dtype
        self._verify = verify
        self._verified: set[str] = set()
        self._checksums: dict[str, str] = {}  # of the files that a record describes
        if records.is_described(self.path):
            if not allow_incomplete or os.path.exists(
                os.path.join(self.path, records.MANIFEST_FILE)
            ):
                self.manifest = read_manifest(self.path)
            self.settings = DatasetSettings.read(self.path)
            if self.settings.format not in FORMATS:
                raise ValueError(
                    f"{self.path} is in the format {self.settings.format}, which is for another "
                    f"program; use a dataset of {', '.join(FORMATS)}"
                )
            if self.manifest is not None and not index_is_sound(self.path):
                raise ValueError(
                    f"{os.path.join(self.path, records.INDEX_FILE)} is damaged: it is not the one "
                    f"that {records.MANIFEST_FILE} was written for"
                )
            files, counts = _recorded_files(self.path, self.settings)
            self._files = [file.name for file in files]
            if verify == "first_read":
                self._checksums = {file.name: file.checksum for file in files}
        else:
            self._files = plain_files(self.path)
            counts = [1] * len(self._files)
        self._starts = [0, *itertools.accumulate(counts)]
        self._ids: Sequence[int] = range(self._starts[-1])
        self._open = self._make_open()
        self.layer_ids, self._row_shape, stored = self._row_form()
        self.hidden_size = self._row_shape[-1]
        if dtype == FP8 and stored not in (None, FP8):
            raise ValueError(f"dtype={dtype}: {self.path} holds {stored}")

    def __repr__(self) -> str:
        return (
            f"HiddenStatesDataset({self.path!r}: {len(self):,} samples, "
            f"layers {list(self.layer_ids)}, hidden size {self.hidden_size})"
        )

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: slice | Sequence[int] | torch.Tensor) -> HiddenStatesDataset: ...
    @overload
    def __getitem__(self, index: int) -> HiddenStatesSample: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(
        self, index: int | slice | Sequence[int] | torch.Tensor | str
    ) -> HiddenStatesSample | HiddenStatesDataset | list[Any]:
        if isinstance(index, str):
            return self._column(index)
        if isinstance(index, slice) or not _is_number(index):
            part = copy.copy(self)
            part._ids = self._ids[index] if isinstance(index, slice) else self._numbers(index)
            return part
        sample, dtype = self.stored(operator.index(cast("Any", index))), self._dtype
        if dtype == FP8 or (sample.scales is None and dtype in (None, sample.hidden_states.dtype)):
            return sample
        return sample.in_float(dtype)

    def stored(self, index: int) -> HiddenStatesSample:
        """Return a sample with the rows as they are stored, views of the file."""
        number = self._number(index)
        file, place = self._locate(number)
        return file.sample(place, number)

    def _number(self, index: int) -> int:
        try:
            return self._ids[index]
        except IndexError:
            raise IndexError(f"sample {index} of {len(self)} in {self.path}") from None

    def _numbers(self, indices: Any) -> Sequence[int]:
        listed = flat_array(indices, "iu")
        if listed is None:
            raise TypeError(f"ds[{indices!r:.50}]: use numbers, a slice, or a column's name")
        return [self._number(index) for index in listed.tolist()]

    def _column(self, name: str) -> list[Any]:
        """Return the values of a column that was kept; reads no rows."""
        places = map(self._locate, self._ids)
        columns = [file.columns(place) for file, place in places]
        known = dict.fromkeys(known for one in columns for known in one)
        if name not in known:
            kept = f"it has {', '.join(known)}" if known else "no columns were kept"
            raise KeyError(f"{self.path} has no column {name!r}; {kept}")
        return [one.get(name) for one in columns]

    def __iter__(self) -> Iterator[HiddenStatesSample]:
        return (self[index] for index in range(len(self)))

    @property
    def file_paths(self) -> list[str]:
        """The files, in the order of their samples."""
        return [os.path.join(self.path, name) for name in self._files]

    def num_rows(self, index: int) -> int:
        """Return the number of rows of a sample; reads no rows."""
        file, place = self._locate(self._ids[index])
        return file.row_offsets[place + 1] - file.row_offsets[place]

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens of a sample; reads no rows."""
        file, place = self._locate(self._ids[index])
        return file.token_offsets[place + 1] - file.token_offsets[place]

    def iter_rows(
        self,
        batch_size: int,
        order: Iterable[int] | None = None,
        *,
        shuffle_rows: int = 0,
        seed: int = 0,
    ) -> Iterator[RowBatch]:
        """Yield all rows in batches of ``batch_size`` (the last one smaller), sample by sample.

        order: the samples to read, in this order (``torch.randperm(len(ds)).tolist()``).
        shuffle_rows: number of rows that wait in memory; each batch is drawn from them by
            ``seed``, so that it has rows of many samples. 0: rows of a sample stay together.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: use at least 1")
        if not isinstance(shuffle_rows, int) or shuffle_rows < 0:
            hint = "use at least 1, or 0 for no shuffling"
            raise ValueError(f"shuffle_rows={shuffle_rows!r}: {hint}")
        batches = self._iter_rows(batch_size, order)
        return shuffled(batches, batch_size, shuffle_rows, seed) if shuffle_rows else batches

    def _iter_rows(self, batch_size: int, order: Iterable[int] | None) -> Iterator[RowBatch]:
        parts: list[RowBatch] = []
        waiting = 0
        for index in range(len(self)) if order is None else order:
            rest = rows_of(self[index])
            while waiting + len(rest.rows) >= batch_size:
                taken = batch_size - waiting
                parts.append(part_of(rest, slice(taken)))
                rest = part_of(rest, slice(taken, None))
                yield join(parts)
                parts, waiting = [], 0
            if len(rest.rows):
                parts.append(rest)
                waiting += len(rest.rows)
        if parts:
            yield join(parts)

    def _locate(self, number: int) -> tuple[SampleFile, int]:
        index = bisect.bisect_right(self._starts, number) - 1
        file = self._open(self._files[index])
        if problem := file.other_form(self.layer_ids, self._row_shape):
            raise ValueError(problem)
        return file, number - self._starts[index]

    def _row_form(self) -> tuple[tuple[LayerId, ...], tuple[int, ...], torch.dtype | None]:
        """Return layer ids, the shape of a row, and the stored dtype (None: not known without
        reading)."""
        if self.settings is not None:
            layer_ids, hidden_size = self.settings.layer_ids, self.settings.hidden_size
            return layer_ids, (len(layer_ids), hidden_size), self.settings.torch_dtype
        if not self._files:
            raise ValueError(f"{self.path}: {NO_FILES}")
        first = self._open(self._files[0])
        return first.layer_ids, first.row_shape, None

    def unmap(self) -> None:
        """Give back the memory of mapped files of which no sample is in use."""
        self._open = self._make_open()

    def _make_open(self) -> Callable[[str], SampleFile]:
        def open_file(name: str) -> SampleFile:
            file = SampleFile(os.path.join(self.path, name))
            if self._verify == "first_read" and name not in self._verified:
                if self._checksums.get(name, file.header_checksum) != file.header_checksum:
                    raise DamagedFileError(
                        f"{file.path}: its header is not the one that was written"
                    )
                for problem in file.problems():
                    raise DamagedFileError(problem)
                self._verified.add(name)
            return file

        return lru_cache(maxsize=_MAPPED_FILES)(open_file)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = self._make_open()


class SampleFile(MappedFile):
    """A shard, which has the offsets of its samples, or the file of one sample."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self.layer_ids = tuple[LayerId, ...](json.loads(self.metadata.get("layer_ids", "[]")))
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"{path}: its layer_ids cannot be read ({error})") from None
        shape = self.shape("hidden_states")
        if self.layer_ids and (len(shape) != 3 or len(self.layer_ids) != shape[1]):
            raise DamagedFileError(
                f"{path}: rows of shape {list(shape[1:])} for layers {list(self.layer_ids)}"
            )
        self.row_shape = tuple(shape[1:])
        self.row_offsets: list[int] = self.offsets("row_offsets").tolist()
        self.token_offsets: list[int] = self.offsets("token_offsets").tolist()

    def other_form(self, layer_ids: tuple[LayerId, ...], row_shape: tuple[int, ...]) -> str | None:
        """Return the problem if the rows have another form than those of the files before."""
        for what, found, expected in (
            ("layers", list(self.layer_ids), list(layer_ids)),
            ("width", *(shape[-1] for shape in (self.row_shape, row_shape))),
            ("shape", list(self.row_shape), list(row_shape)),
        ):
            if found != expected:
                return (
                    f"{self.path} has rows of {what} {found}, the files before it have "
                    f"{expected}; together they are not a dataset"
                )
        return None

    def sample(self, place: int, number: int) -> HiddenStatesSample:
        """Return the sample at ``place``; ``number`` is its index if the file does not say."""
        rows = self.row_offsets[place : place + 2]
        values = self.tensor("hidden_states", *rows)
        index, record, name = self._identity(place, number)
        columns = self.columns(place)
        generated = columns.get(NUM_GENERATED, 0)
        return HiddenStatesSample(
            index=index,
            request_id=name,
            token_ids=self.tensor("token_ids", *self.token_offsets[place : place + 2]).long(),
            positions=self.tensor("positions", *rows).long()
            if "positions" in self
            else torch.arange(len(values)),
            tensors={"hidden_states": values} | self._tensors(rows),
            layer_ids=self.layer_ids,
            record=record,
            constants=self._constants,
            columns=columns,
            num_generated_tokens=generated if isinstance(generated, int) else 0,
        )

    def columns(self, place: int) -> dict[str, Any]:
        """Return the columns that were kept of the sample at ``place``. A server's file states in
        its metadata how many of its tokens were generated."""
        columns = super().columns(place)
        if _NUM_PROMPT in self.metadata:
            num_generated = self.token_offsets[-1] - int(self.metadata[_NUM_PROMPT])
            columns.setdefault(NUM_GENERATED, num_generated)
        return columns

    def _tensors(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Return the tensors of these rows besides their hidden states."""
        scales = self.scales(*rows)
        tensors = {} if scales is None else {"scales": scales}
        if self.metadata.get("positions") == "mask" and "pooling" not in self.metadata:
            tensors[LOSS_MASK] = torch.ones(rows[1] - rows[0], dtype=torch.bool)
        names = self._stored_names.tensors
        tensors |= {name: self.tensor(name, *rows) for name in names if name in self}
        if LOSS_MASK in tensors:  # numbers would be taken for the places of rows
            tensors[LOSS_MASK] = tensors[LOSS_MASK].bool()
        return tensors

    @cached_property
    def _stored_names(self) -> StoredNames:
        return StoredNames.in_file(self.metadata)

    @cached_property
    def _constants(self) -> dict[str, list[int]]:
        """The constants: tensors in a file of a dataset, metadata in one of the connector."""
        names = self._stored_names.constants
        stated = {n: json.loads(self.metadata[n]) for n in names if n in self.metadata}
        return stated | {name: self.tensor(name).tolist() for name in names if name in self}

    def _identity(self, place: int, number: int) -> tuple[int, int | None, str]:
        """Return the numbers of the sample and of its record in the input, and its name."""
        if "sample_index" in self:
            sample, record = (
                int(self.tensor(column, place, place + 1)[0])
                for column in ("sample_index", "record_index")
            )
            return sample, record, ""
        name = os.path.basename(self.path).removesuffix(".safetensors")
        speculators = re.fullmatch(r"hs_(\d+)", name)
        stored = self.metadata.get("record", speculators and speculators[1])
        sample = int(self.metadata.get("sample", number))
        return sample, None if stored is None else int(stored), name


def _recorded_files(path: str, settings: DatasetSettings) -> tuple[list[FileRecord], list[int]]:
    """Return the files in the order of the samples, and the number of samples in each."""
    files: list[FileRecord] = []
    counts: list[int] = []
    for unit in read_unit_records(path):
        files += unit.files
        counts += [unit.num_samples] if settings.format == "sharded" else [1] * len(unit.files)
    return files, counts


def plain_files(path: str, suffixes: tuple[str, ...] = (SAFETENSORS,)) -> list[str]:
    """Return the names of files in a folder that end so, with numbers sorted by value."""
    if not os.path.isdir(path):
        raise ValueError(f"{path}: there is no such folder")
    names = [name for name in os.listdir(path) if name.endswith(suffixes)]
    # hs_2 before hs_10
    return sorted(
        (name for name in names if not name.startswith(".")),
        key=lambda name: [int(part) if part.isdecimal() else part for part in _NUMBERS.split(name)],
    )


def _is_number(index: object) -> bool:
    """Return whether it is an integer of any library, a tensor with one too."""
    try:
        operator.index(cast("Any", index))
    except TypeError:
        return False
    return not (isinstance(index, torch.Tensor) and index.ndim)
