"""The plan: every sample with its tokens, cut into units of commit, before anything runs.

One pass over the input writes it to a folder; from then on samples are read from there, in any
order, by any process, without the input or the tokenizer:

    samples.bin     one _SAMPLE for each sample, in the order of the dataset
    token_ids.bin   int32, in the order of the input
    masks.bin       one byte for each token, only where positions come from a mask
    names.bin       names of samples, UTF-8
    units.bin       int64, the first sample of each unit, and the number of samples
    skipped.jsonl   {"record": ..., "reason": ...} of each record that is no sample
    plan.json       totals; written last

The same input and rules give the same bytes. Memory does not depend on the tokens, and takes
some 50 bytes a sample only while units are cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from vllm.entrypoints.extract.prompts import Prompt, PromptMaker
from vllm.entrypoints.extract.records import Record, Source, read_records
from vllm.hidden_states.positions import PositionSelection
from vllm.hidden_states.units import plan_units
from vllm.logger import init_logger

logger = init_logger(__name__)

_SAMPLE = np.dtype(
    [
        (name, "<i8")
        for name in ("record", "token_start", "num_tokens", "num_rows", "name_start", "name_end")
    ]
)
_FILES = ("samples", "token_ids", "masks", "names", "units")
BUILDING_PREFIX = ".plan-"
"""Of folders that are not finished."""
_TOTALS = "plan.json"
_SKIPPED = "skipped.jsonl"
_COUNTS = ("num_records", "num_samples", "num_tokens", "num_rows", "num_truncated", "num_skipped")
_RECORDS_AT_ONCE = 64
_TOKEN_BYTES = 8
"""What a token id takes in the dataset."""
_REPORTED_ONE_BY_ONE = 20

Item = TypeVar("Item")


class PlannedSample(NamedTuple):
    """One sample: what to run, and what to call it."""

    sample: int
    record: int
    token_ids: list[int]
    positions: list[int] | None
    """Where they come from a mask."""
    num_rows: int
    name: str


@dataclass(frozen=True)
class PlanRules:
    """What the plan depends on, beside the prompts."""

    key: str
    """Of the input and of all settings; a plan of another key is not used."""
    positions: PositionSelection
    row_bytes: int
    """Of one stored row, scales included."""
    unit_bytes: int
    """A unit has no more, unless one sample alone has."""
    max_samples: int | None = None
    shuffle_seed: int | None = None
    on_error: Literal["skip", "fail"] = "skip"
    names_are_unique: bool = False


@dataclass(frozen=True)
class PlanTotals:
    """Counts over the whole plan."""

    num_records: int
    num_samples: int
    num_tokens: int
    num_rows: int
    num_truncated: int
    num_skipped: int
    num_bytes: int
    longest: int
    """Tokens of the longest sample."""
    key: str
    """What the plan was made from."""


class Plan:
    """A plan in its folder, mapped into memory. OSError: there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.totals = PlanTotals(**json.loads((folder / _TOTALS).read_text()))
        self._samples = _map(folder / "samples.bin", _SAMPLE)
        self._token_ids = _map(folder / "token_ids.bin", np.dtype("<i4"))
        self._masks = _map(folder / "masks.bin", np.dtype("u1"))
        self._names = _map(folder / "names.bin", np.dtype("u1"))
        self._units = _map(folder / "units.bin", np.dtype("<i8"))

    @property
    def num_units(self) -> int:
        return len(self._units) - 1

    def samples_of(self, unit: int) -> range:
        """Numbers of the samples of a unit."""
        return range(int(self._units[unit]), int(self._units[unit + 1]))

    def num_tokens(self, unit: int) -> int:
        samples = self.samples_of(unit)
        return int(self._samples[samples.start : samples.stop]["num_tokens"].sum())

    def sample(self, number: int) -> PlannedSample:
        record, start, num_tokens, num_rows, name_start, name_end = self._samples[number].tolist()
        tokens = slice(start, start + num_tokens)
        positions = np.flatnonzero(self._masks[tokens]).tolist() if len(self._masks) else None
        return PlannedSample(
            number,
            record,
            self._token_ids[tokens].tolist(),
            positions,
            num_rows,
            self._names[name_start:name_end].tobytes().decode(),
        )

    def skipped(self) -> Iterator[tuple[int, str]]:
        """(record, reason) of each record that is no sample."""
        with (self.folder / _SKIPPED).open() as file:
            for line in file:
                entry = json.loads(line)
                yield entry["record"], entry["reason"]


def has_plan(folder: Path, key: str) -> bool:
    """Whether there is a whole plan of this key."""
    return (folder / _TOTALS).exists() and Plan(folder).totals.key == key


def make_plan(
    folder: Path, sources: Sequence[Source], columns: Sequence[str], maker: PromptMaker,
    rules: PlanRules,
) -> Plan:  # fmt: skip
    """Read the input and write the plan to ``folder``, which appears when it is whole.

    ValueError: a record is bad and that is an error, no record can be used, or the input
    cannot be read to its end.
    """
    building = folder.with_name(f"{BUILDING_PREFIX}{uuid.uuid4().hex}")
    building.mkdir()
    try:
        with _Builder(building, rules) as builder:
            records, order = _chosen(sources, columns, rules)
            for batch in _batches(records, _RECORDS_AT_ONCE):
                for record, prompt in zip(batch, maker.make(batch), strict=True):
                    builder.add(record, prompt)
        builder.finish(order)
        if not has_plan(folder, rules.key):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank was faster, with the same bytes
            os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Plan(folder)


def _chosen(
    sources: Sequence[Source], columns: Sequence[str], rules: PlanRules
) -> tuple[Iterator[Record], npt.NDArray[np.int64] | None]:
    """The records to use, and the place of each record number in a shuffled order."""
    records = read_records(sources, columns)
    if rules.shuffle_seed is None:
        return itertools.islice(records, rules.max_samples), None
    count = sum(1 for _ in read_records(sources, ()))
    places = np.empty(count, dtype=np.int64)
    # This generator, unlike numpy's newer ones, gives the same numbers in every version.
    places[np.random.RandomState(rules.shuffle_seed).permutation(count)] = np.arange(count)
    last = count if rules.max_samples is None else rules.max_samples
    return (record for record in records if places[record.number] < last), places


class _Builder:
    """Writes the files of a plan, sample by sample."""

    def __init__(self, folder: Path, rules: PlanRules) -> None:
        self._folder = folder
        self._rules = rules
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._name_bytes = 0
        self._progress = tqdm(desc="Planning", unit=" records", dynamic_ncols=True, leave=False)

    def __enter__(self) -> _Builder:
        with ExitStack() as stack:
            self._files: dict[str, BinaryIO] = {
                name: stack.enter_context((self._folder / f"{name}.bin").open("wb"))
                for name in _FILES
            }
            self._skipped = stack.enter_context((self._folder / _SKIPPED).open("w"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._stack.close()

    def add(self, record: Record, prompt: Prompt | str) -> None:
        self._counts["num_records"] += 1
        self._progress.update()
        if isinstance(prompt, str):
            self._skip(record, prompt)
            return
        num_tokens = prompt.token_ids.size
        num_rows = len(self._rules.positions.select(num_tokens, prompt.mask))  # type: ignore[arg-type]
        name = prompt.name.encode()
        start, name_start = self._counts["num_tokens"], self._name_bytes
        self._name_bytes += len(name)
        entry = (record.number, start, num_tokens, num_rows, name_start, self._name_bytes)
        self._files["samples"].write(np.array([entry], dtype=_SAMPLE).tobytes())
        self._files["token_ids"].write(prompt.token_ids.astype("<i4").tobytes())
        if prompt.mask is not None:
            self._files["masks"].write(prompt.mask.tobytes())
        self._files["names"].write(name)
        self._counts["num_samples"] += 1
        self._counts["num_tokens"] += num_tokens
        self._counts["num_rows"] += num_rows
        self._counts["num_truncated"] += prompt.is_truncated

    def _skip(self, record: Record, reason: str) -> None:
        if self._rules.on_error == "fail":
            raise ValueError(f"{record.place}: {reason}; --on-error skip goes on without it")
        self._counts["num_skipped"] += 1
        if self._counts["num_skipped"] <= _REPORTED_ONE_BY_ONE:
            logger.warning("%s: skipped: %s", record.place, reason)
        entry = {"record": record.number, "reason": f"{reason} ({record.place})"}
        self._skipped.write(json.dumps(entry) + "\n")

    def finish(self, places: npt.NDArray[np.int64] | None) -> None:
        """Bring samples into their order, cut units, write the totals; the files are closed."""
        samples = _map(self._folder / "samples.bin", _SAMPLE)
        if not len(samples):
            raise ValueError(
                f"--input: none of {self._counts['num_records']} records can be used"
                + "".join(f"; {reason}" for _, reason in _first_skipped(self._folder))
            )
        if places is not None:
            samples = samples[np.argsort(places[samples["record"]])]
            (self._folder / "samples.bin").write_bytes(samples.tobytes())
        if self._rules.names_are_unique:
            self._check_names(samples)
        sizes = samples["num_rows"] * self._rules.row_bytes + samples["num_tokens"] * _TOKEN_BYTES
        units = plan_units(map(int, sizes), self._rules.unit_bytes)
        ends = np.fromiter((unit.stop for unit in units), dtype="<i8")
        (self._folder / "units.bin").write_bytes(np.insert(ends, 0, 0).tobytes())
        longest = int(samples["num_tokens"].max())
        totals = PlanTotals(
            **self._counts, num_bytes=int(sizes.sum()), longest=longest, key=self._rules.key
        )
        (self._folder / _TOTALS).write_text(json.dumps(dataclasses.asdict(totals)))
        for path in (*self._folder.iterdir(), self._folder):
            _sync(path)

    def _check_names(self, samples: npt.NDArray[Any]) -> None:
        content = (self._folder / "names.bin").read_bytes()
        seen: set[bytes] = set()
        for start, end in zip(samples["name_start"], samples["name_end"], strict=True):
            name = content[start:end]
            if name in seen:
                raise ValueError(
                    f"--id-column: two samples are called {name.decode()!r}; use a column that "
                    "tells them apart, or none"
                )
            seen.add(name)


def _first_skipped(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / _SKIPPED).read_text().splitlines()[:1]
    return [(entry["record"], entry["reason"]) for entry in map(json.loads, lines)]


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "BUILDING_PREFIX",
    "Plan",
    "PlanRules",
    "PlanTotals",
    "PlannedSample",
    "has_plan",
    "make_plan",
]
