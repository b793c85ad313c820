"""One engine and its writer: units in, committed units out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.folder import PLAN_FOLDER
from vllm.entrypoints.extract.plan import Plan, PlannedSample
from vllm.entrypoints.extract.units import Progress, UnitSource
from vllm.entrypoints.extract.writer_thread import WriterThread
from vllm.hidden_states.records import DatasetSettings
from vllm.hidden_states.request import ExtractRequest
from vllm.hidden_states.sample import FailedSample, HiddenStatesError, HiddenStatesSample
from vllm.hidden_states.units import UnitWriter, open_unit_writer

_REPORT_SECONDS = 0.2
_CLAIM_SECONDS = 0.2

Result = HiddenStatesSample | FailedSample


class Extractor(AbstractContextManager["Extractor"], Protocol):
    """What is used of :class:`vllm.LLM`."""

    def extract(
        self,
        prompts: Iterable[ExtractRequest],
        layers: tuple[int, ...],
        positions: str,
        dtype: str,
        *,
        ordered: bool,
        on_error: Literal["raise", "yield"],
    ) -> Iterator[Result]: ...


LoadEngine = Callable[[EngineArgs], Extractor]


@dataclass(frozen=True)
class WorkerJob:
    """All that a worker needs to know; can be pickled."""

    directory: Path
    settings: DatasetSettings
    engine_args: EngineArgs
    load_engine: LoadEngine
    on_error: Literal["skip", "fail"]


class _Item(NamedTuple):
    """A sample on its way to the disk."""

    unit: int
    is_last: bool
    """Of its unit."""
    planned: PlannedSample
    result: Result

    @property
    def num_bytes(self) -> int:
        """Of the rows; 0 where there are none."""
        result = self.result
        return result.hidden_states.nbytes if isinstance(result, HiddenStatesSample) else 0


def run_worker(number: int, job: WorkerJob, source: UnitSource) -> None:
    """Do units until there are none.

    OSError: the disk is full, or cannot be written. RuntimeError: a sample failed, and that is
    an error. Units that are not committed leave nothing behind.
    """
    plan = Plan(job.directory / PLAN_FOLDER)
    with (
        job.load_engine(job.engine_args) as engine,
        _UnitWriting(number, job, source) as writing,
        WriterThread(writing.write) as thread,
    ):
        while True:
            unit = source.claim(number)
            if unit is not None:
                for item in _results(engine, job.settings, plan, unit, source, number):
                    thread.put(item, item.num_bytes)
                continue
            thread.drain()
            if source.is_finished():
                return
            time.sleep(_CLAIM_SECONDS)  # others have the rest, and may die yet


def _results(
    engine: Extractor,
    settings: DatasetSettings,
    plan: Plan,
    first_unit: int,
    source: UnitSource,
    number: int,
) -> Iterator[_Item]:
    """Results of units in order, without a pause between them.

    Ends when there is no further unit at once: waiting inside the stream of prompts would keep
    the engine from finishing those it has.
    """
    under_way: deque[tuple[int, bool, PlannedSample]] = deque()

    def requests() -> Iterator[ExtractRequest]:
        unit: int | None = first_unit
        while unit is not None:
            samples = plan.samples_of(unit)
            for sample in samples:
                planned = plan.sample(sample)
                under_way.append((unit, sample == samples[-1], planned))
                prompt = {"prompt_token_ids": planned.token_ids}
                yield ExtractRequest(prompt, positions=planned.positions)  # type: ignore[arg-type]
            unit = source.claim(number)

    results = engine.extract(
        requests(),
        settings.layer_ids,
        "all" if settings.positions == "mask" else settings.positions,
        settings.dtype,
        ordered=True,
        on_error="yield",
    )
    for result in results:
        yield _Item(*under_way.popleft(), result)
    assert not under_way, f"{len(under_way)} samples were lost"


class _UnitWriting:
    """Writes items into their units, on the writer's thread."""

    def __init__(self, number: int, job: WorkerJob, source: UnitSource) -> None:
        self._number = number
        self._job = job
        self._source = source
        self._writer: UnitWriter | None = None
        self._unreported = Progress()
        self._reported_at = 0.0

    def write(self, item: _Item) -> None:
        started = time.perf_counter()
        settings = self._job.settings
        if self._writer is None:
            self._writer = open_unit_writer(
                str(self._job.directory), settings.format, item.unit, settings.header
            )
        num_bytes = self._append(self._writer, item)
        if item.is_last:
            self._writer.commit()
            self._writer = None
        num_tokens = len(item.planned.token_ids)
        self._count(Progress(1, num_tokens, num_bytes, time.perf_counter() - started))
        if item.is_last:
            self._report()
            self._source.commit(self._number, item.unit)

    def _append(self, writer: UnitWriter, item: _Item) -> int:
        """Bytes of the rows; 0 for a sample that is skipped."""
        planned, result = item.planned, item.result
        reason = result.reason if isinstance(result, FailedSample) else ""
        if isinstance(result, HiddenStatesSample):
            if result.token_ids.tolist() != planned.token_ids:
                raise AssertionError(f"sample {planned.sample}: rows of other tokens came back")
            try:
                writer.append(result, planned.sample, planned.record, planned.name or None)
                return item.num_bytes
            except HiddenStatesError as error:
                reason = error.reason
        if self._job.on_error == "fail":
            raise RuntimeError(
                f"sample {planned.sample} (record {planned.record}): {reason}; --on-error skip "
                "goes on without it"
            )
        writer.skip(planned.sample, planned.record, f"engine: {reason}")
        return 0

    def _count(self, progress: Progress) -> None:
        self._unreported = self._unreported.plus(progress)
        if time.perf_counter() - self._reported_at >= _REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._source.report(self._number, self._unreported)
        self._unreported = Progress()
        self._reported_at = time.perf_counter()

    def __enter__(self) -> _UnitWriting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.abort()


__all__ = ["Extractor", "LoadEngine", "WorkerJob", "run_worker"]
