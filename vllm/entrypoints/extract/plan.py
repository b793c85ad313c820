"""The plan: every sample with its tokens, cut into units of commit before anything runs.

One pass over the input writes the plan to a folder. From then on any process can read samples
from there, in any order, without the input or the tokenizer:

    samples.bin     one _SAMPLE for each sample, in the order of the dataset
    token_ids.bin   int32, in the order of the input
    masks.bin       one byte for each token, only if masks are wanted
    names.bin       name of each sample, a zero byte, and JSON of the columns that are kept; UTF-8
    units.bin       int64, the first sample of each unit, and the number of samples
    skipped.jsonl   {"record": ..., "reason": ...} of each record that is not a sample
    plan.json       totals, and checksums of the others; written last

The same input and settings give the same bytes. The memory used does not depend on the tokens;
cutting the units takes some 50 bytes per sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from vllm.entrypoints.extract.generation import choices_of, source_columns
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.prompts import Prompt, PromptMaker
from vllm.entrypoints.extract.records import Record, Source, input_digest, read_records
from vllm.hidden_states.metadata import DatasetSettings, SkippedRecord
from vllm.hidden_states.names import CHECKSUM_KIND
from vllm.hidden_states.positions import parse_positions
from vllm.hidden_states.tensor_file import checksum
from vllm.hidden_states.units import file_stem, plan_units
from vllm.hidden_states.windows import Window, WindowCutter
from vllm.logger import init_logger
from vllm.utils.progress import progress_bar
from vllm.utils.regular_files import open_regular
from vllm.utils.text import parse_json
from vllm.utils.whole_files import sync_path, temporary_path

if TYPE_CHECKING:
    import numpy.typing as npt

logger = init_logger(__name__)

_SAMPLE = np.dtype(
    [
        (name, "<i8")
        for name in ("record", "token_start", "num_tokens", "num_rows", "name_start", "name_end")
    ]
)
_FILES = ("samples", "token_ids", "masks", "names", "units")
PLAN_FOLDER = "plan"
_TOTALS = "plan.json"
_SKIPPED = "skipped.jsonl"
_RECORDS_AT_ONCE = 64
_MOST_TOTALS_BYTES = 1 << 20
_VERSION = 5
"""Version of the files above."""
_STORED_ID_BYTES = 8
"""Bytes of a token id in the dataset."""
_REPORTED_ONE_BY_ONE = 20


class PlannedSample(NamedTuple):
    """One sample: the tokens to run, and what is stored with them."""

    sample: int
    record: int
    token_ids: list[int]
    mask: torch.Tensor | None
    """bool [tokens], the loss mask, from which positions may come; None if there are no masks."""
    num_rows: int
    name: str
    columns: Mapping[str, Any]


@dataclass
class PlanTotals:
    """Counts over the whole plan."""

    key: str
    """Digest of the settings that the plan was made from."""
    num_records: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    """Rows of all samples; the most that there can be if tokens are generated."""
    num_truncated: int = 0
    num_second_bos: int = 0
    num_left_over: int = 0
    """Tokens of a last window that was dropped."""
    num_unmasked_windows: int = 0
    """Windows that were dropped because no token in them counts."""
    num_skipped: int = 0
    num_masked: int = 0
    """Samples that have a loss mask to store, also one that selects no token."""
    num_bytes: int = 0
    row_bytes: int = 0
    """Bytes of one stored row."""
    longest: int = 0
    """Tokens of the longest sample."""
    first_unit: int = 0
    """Number of the first unit in the dataset; not 0 if the input is added to others."""
    first_sample: int = 0
    first_record: int = 0
    files: dict[str, str] = field(default_factory=dict)
    """Checksum of each other file."""


class Plan:
    """A plan in its folder, mapped into memory; raises OSError if there is none.

    Units, samples and records have their numbers in the dataset.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.totals = PlanTotals(**json.loads((folder / _TOTALS).read_text()))
        self._samples = _map(folder / "samples.bin", _SAMPLE)
        self._token_ids = _map(folder / "token_ids.bin", np.dtype("<i4"))
        self._masks = _map(folder / "masks.bin", np.dtype("u1"))
        self._names = _map(folder / "names.bin", np.dtype("u1"))
        self._units = _map(folder / "units.bin", np.dtype("<i8"))

    @property
    def units(self) -> range:
        first = self.totals.first_unit
        return range(first, first + len(self._units) - 1)

    def samples_of(self, unit: int) -> range:
        """Return the numbers of a unit's samples."""
        first, place = self.totals.first_sample, unit - self.totals.first_unit
        return range(first + int(self._units[place]), first + int(self._units[place + 1]))

    def num_tokens(self, samples: Sequence[int]) -> int:
        """Return the number of tokens of these samples."""
        places = np.array(samples, dtype=np.int64) - self.totals.first_sample
        return int(self._samples["num_tokens"][places].sum())

    def _rows_of(self, unit: int) -> npt.NDArray[Any]:
        samples, first = self.samples_of(unit), self.totals.first_sample
        return self._samples[samples.start - first : samples.stop - first]

    def num_bytes(self, units: Iterable[int]) -> int:
        """Return the bytes that the rows and tokens of units take in the dataset."""
        spans = [*map(self._rows_of, units)]
        rows = sum(int(span["num_rows"].sum()) for span in spans)
        tokens = sum(int(span["num_tokens"].sum()) for span in spans)
        return rows * self.totals.row_bytes + tokens * _STORED_ID_BYTES

    def complete(self, settings: DatasetSettings) -> DatasetSettings:
        """Return the settings with what only the plan can tell."""
        num_samples = self.totals.first_sample + self.totals.num_samples
        is_padded = "pack_last" in settings.options and settings.positions != "mask"
        has_loss_mask = settings.has_loss_mask or self.totals.num_masked > 0 or is_padded
        return settings.with_plan(self.units.stop, num_samples, has_loss_mask)

    def sample(self, number: int) -> PlannedSample:
        stored = self._samples[number - self.totals.first_sample].tolist()
        record, start, num_tokens, num_rows, name_start, name_end = stored
        tokens = slice(start, start + num_tokens)
        mask = torch.from_numpy(self._masks[tokens].astype(bool)) if len(self._masks) else None
        name, _, columns = self._names[name_start:name_end].tobytes().rpartition(b"\0")
        return PlannedSample(
            number,
            self.totals.first_record + record,
            self._token_ids[tokens].tolist(),
            mask,
            num_rows,
            name.decode(),
            json.loads(columns),
        )

    def skipped(self) -> list[SkippedRecord]:
        """Return every record that is not a sample."""
        with (self.folder / _SKIPPED).open() as file:
            skipped = [SkippedRecord(**json.loads(line)) for line in file]
        first = self.totals.first_record
        return [dataclasses.replace(one, record=first + one.record) for one in skipped]


def has_plan(folder: Path, settings: DatasetSettings) -> bool:
    """Return whether there is a whole plan for these settings, regardless of their counts."""
    try:
        with open_regular(folder / _TOTALS, _MOST_TOTALS_BYTES) as file:
            stated = parse_json(file.read())
        return bool(stated["key"] == _key(settings) and stated["files"] == _checksums(folder))
    except (OSError, ValueError, TypeError, KeyError):  # none, or it is damaged
        return False


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != _TOTALS:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, lambda: xxhash.xxh3_128())
            found[path.name] = CHECKSUM_KIND + digest.hexdigest()
    return found


def _key(settings: DatasetSettings) -> str:
    identity = settings.with_plan(0, 0, False).identity()
    return checksum(json.dumps([_VERSION, identity], sort_keys=True).encode())


def make_plan(
    folder: Path,
    sources: Sequence[Source],
    maker: PromptMaker,
    settings: DatasetSettings,
    names: Iterable[str] = (),
    digest: str | None = None,
) -> Plan:
    """Read the input and write the plan to ``folder``, which appears when it is complete.

    settings: those of this input. names: names of samples that other inputs have. digest: what the
    input's has to be afterwards, too.
    Raises ValueError if a record cannot be used and ``on_error`` is "fail", no record can be used,
    the input cannot be read to its end or changes meanwhile, or it has masks that an existing
    dataset has no place for.
    """
    building = Path(temporary_path(folder))
    building.mkdir()
    try:
        records, places = _chosen(sources, maker)
        start = settings.inputs[-1]
        totals = PlanTotals(
            _key(settings),
            row_bytes=settings.row_bytes,
            first_unit=start.first_unit,
            first_sample=start.first_sample,
            first_record=start.first_record,
        )
        _write_samples(building, records, maker, totals, set(names))
        if digest is not None and input_digest(sources) != digest:
            raise ValueError("--input: a file changed while it was read; run the command again")
        if start.first_unit and totals.num_masked and not settings.has_loss_mask:
            raise ValueError(
                f"append: {totals.num_masked} of the new samples have a loss mask, and the dataset "
                "stores none, so all of their tokens would count; make a dataset of their own, "
                "with another --output"
            )
        if places is not None:
            _shuffle(building / "samples.bin", places, maker.options)
        most_new = maker.options.max_tokens if maker.options.generate else 0
        _cut_units(building, settings.shard_bytes, totals, most_new)
        _finish(building, totals)
        if folder.exists() and not has_plan(folder, settings):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank was faster, with the same bytes
            os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Plan(folder)


def _chosen(
    sources: Sequence[Source], maker: PromptMaker
) -> tuple[Iterator[Record], npt.NDArray[np.int64] | None]:
    """Return the records to use, and the place of each record number in a shuffled order."""
    records, options = read_records(sources, maker.columns), maker.options
    if options.shuffle_seed is None:
        return itertools.islice(records, options.max_samples), None
    count = sum(1 for _ in read_records(sources, ()))
    places = np.empty(count, dtype=np.int64)
    # This generator, unlike numpy's newer ones, gives the same numbers in every version.
    places[np.random.RandomState(options.shuffle_seed).permutation(count)] = np.arange(count)
    last = count if options.max_samples is None else options.max_samples
    return (record for record in records if places[record.number] < last), places


def _write_samples(
    folder: Path,
    records: Iterator[Record],
    maker: PromptMaker,
    totals: PlanTotals,
    names: set[str],
) -> None:
    """Write the files that are in the order of the input."""
    options, first_reason = maker.options, ""
    cutter, padding = None, None
    unseen = {("--keep-columns", name) for name in options.keep_columns}
    if options.mask_column is not None:
        unseen.add(("--mask-column", options.mask_column))
    if options.pack is not None:
        separator, bos, padding = maker.pack_tokens()
        cutter = WindowCutter(options.pack, separator, bos)
    with ExitStack() as stack:
        files = stack.enter_context(_SampleFiles(folder, maker, totals))
        skipped = stack.enter_context((folder / _SKIPPED).open("w"))
        bar = stack.enter_context(progress_bar(desc="Planning", unit=" records", leave=False))
        parts = _parts_of(records, maker, totals, bar)
        while batch := list(itertools.islice(parts, _RECORDS_AT_ONCE)):
            for record, prompt in zip(batch, maker.make(batch), strict=True):
                if isinstance(prompt, str):
                    totals.num_skipped += 1
                    _report_skipped(record, prompt, options, totals.num_skipped)
                    reason = f"{prompt} ({record.place})"
                    first_reason = first_reason or f"; {reason}"
                    skipped.write(json.dumps({"record": record.number, "reason": reason}) + "\n")
                    continue
                totals.num_truncated += prompt.is_truncated
                unseen -= {one for one in unseen if record.values.get(one[1]) is not None}
                if cutter is not None:
                    files.add_windows(cutter.add(record, prompt.token_ids, prompt.mask))
                    continue
                if options.id_column is not None:
                    _check_name(file_stem(prompt.name), names)
                kept = {one: record.values.get(one) for one in options.keep_columns}
                kept |= {"turn": record.turn} if options.split_turns else {}
                kept |= source_columns(prompt.source)
                files.add(record.number, prompt, kept)
        if cutter is not None:
            files.add_windows(() if padding is None else cutter.pad(padding))
            totals.num_left_over = cutter.num_waiting
    totals.num_second_bos = maker.num_second_bos
    if not totals.num_samples:
        if totals.num_left_over:
            first_reason = f"; they have {totals.num_left_over} tokens, fewer than one window"
        raise ValueError(f"--input: none of {totals.num_records} records can be used{first_reason}")
    if unseen:
        flag, name = min(unseen)
        raise ValueError(f"{flag} {name}: no sample has such a column")


def _parts_of(
    records: Iterator[Record], maker: PromptMaker, totals: PlanTotals, bar: Any
) -> Iterator[Record]:
    """Yield the parts of records that become samples, and count the records."""
    for record in records:
        totals.num_records += 1
        bar.update()
        yield from maker.split(record)


class _SampleFiles:
    """Writes the files of samples; a context manager that closes them."""

    def __init__(self, folder: Path, maker: PromptMaker, totals: PlanTotals) -> None:
        self._stack = ExitStack()
        open_file = self._stack.enter_context
        self._files = {name: open_file((folder / f"{name}.bin").open("wb")) for name in _FILES}
        self._maker = maker
        self._totals = totals
        self._positions = parse_positions(maker.options.positions)
        self._num_ids = self._name_bytes = 0

    def __enter__(self) -> _SampleFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, record: int, prompt: Prompt, columns: Mapping[str, Any]) -> None:
        """Write a sample, or one for each continuation. record: the number of its record, or of
        the first of them."""
        totals, files, options = self._totals, self._files, self._maker.options
        num_tokens, num_rows = prompt.token_ids.size, _num_rows(prompt, options)
        for choice in choices_of(options.n):
            stored = json.dumps({**columns, **choice}, default=str).encode()
            name = _name_of(prompt.name, choice).encode() + b"\0" + stored
            sample = (record, self._num_ids, num_tokens, num_rows, self._name_bytes)
            self._name_bytes += len(name)
            row = np.array([(*sample, self._name_bytes)], dtype=_SAMPLE)
            files["samples"].write(row.tobytes())
            files["names"].write(name)
        self._num_ids += num_tokens
        files["token_ids"].write(prompt.token_ids.astype("<i4").tobytes())
        if self._maker.makes_masks:
            mask = np.ones(num_tokens, bool) if prompt.mask is None else prompt.mask
            files["masks"].write(mask.tobytes())
            totals.num_masked += self._maker.stores_loss_mask and prompt.mask is not None
        totals.num_masked += options.n * (options.generate and self._maker.stores_loss_mask)
        totals.num_samples += options.n
        totals.num_tokens += options.n * num_tokens
        totals.num_rows += options.n * num_rows

    def add_windows(self, windows: Iterable[Window]) -> None:
        """Write windows with a column that lists the texts in them."""
        for window in windows:
            if self._positions.kind == "mask" and window.mask is not None and not window.mask.any():
                self._totals.num_unmasked_windows += 1
                continue
            texts = [
                {
                    "record": self._totals.first_record + part.text.number,
                    **({} if part.text.turn is None else {"turn": part.text.turn}),
                    "start": part.start,
                    "end": part.end,
                    "offset": part.offset,
                }
                for part in window.parts
            ]
            prompt = Prompt(window.token_ids, window.mask, "", False)
            self.add(window.parts[0].text.number, prompt, {"texts": texts})


def _num_rows(prompt: Prompt, options: ExtractOptions) -> int:
    """Return the number of rows of a sample, or the most of them if the output is not known."""
    positions = parse_positions(options.positions)
    if positions.kind == "generated":
        num_rows = options.max_tokens
    else:
        most_tokens = prompt.token_ids.size + (options.max_tokens if options.generate else 0)
        num_rows = len(positions.select(most_tokens, prompt.mask))  # type: ignore[arg-type]
    return num_rows if options.pooling == "none" else min(num_rows, 1)


def _name_of(name: str, choice: Mapping[str, int]) -> str:
    """Return the name of a sample; continuations of one prompt have their own."""
    return "-".join([name, *map(str, choice.values())]) if name else name


def _check_name(name: str, names: set[str]) -> None:
    if name in names:
        raise ValueError(
            f"--id-column: two samples would be in {name}.safetensors; use a column with a "
            "different name for each sample, or none"
        )
    names.add(name)


def _report_skipped(record: Record, reason: str, options: ExtractOptions, count: int) -> None:
    if options.on_error == "fail":
        raise ValueError(f"{record.place}: {reason}; use --on-error skip to continue without it")
    if count <= _REPORTED_ONE_BY_ONE:
        logger.warning("%s: skipped: %s", record.place, reason)


def _shuffle(path: Path, places: npt.NDArray[np.int64], options: ExtractOptions) -> None:
    """Put the samples in the order of their records' ``places``, or windows in an order of their
    own."""
    samples = _map(path, _SAMPLE)
    if options.pack is not None:
        keys = np.random.RandomState(options.shuffle_seed).permutation(len(samples))
    else:
        keys = places[samples["record"]]
    path.write_bytes(samples[np.argsort(keys, kind="stable")].tobytes())


def _cut_units(folder: Path, unit_bytes: int, totals: PlanTotals, most_new: int) -> None:
    """Cut units. ``most_new``: the most tokens generated for a sample."""
    samples = _map(folder / "samples.bin", _SAMPLE)
    num_tokens = samples["num_tokens"] + most_new
    sizes = samples["num_rows"] * totals.row_bytes + num_tokens * _STORED_ID_BYTES
    units = plan_units(map(int, sizes), unit_bytes)
    ends = np.fromiter((unit.stop for unit in units), dtype="<i8")
    (folder / "units.bin").write_bytes(np.insert(ends, 0, 0).tobytes())
    totals.longest = int(num_tokens.max())
    totals.num_bytes = int(sizes.sum())


def _finish(folder: Path, totals: PlanTotals) -> None:
    """Write the totals, with checksums of all other files, when nothing else takes memory."""
    totals.files = _checksums(folder)
    (folder / _TOTALS).write_text(json.dumps(dataclasses.asdict(totals)))
    for path in (*folder.iterdir(), folder):
        sync_path(path)


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
