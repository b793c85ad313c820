"""One engine and its writer: units in, committed units out."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.generation import params_of, with_answer
from vllm.entrypoints.extract.plan import PLAN_FOLDER, Plan, PlannedSample
from vllm.entrypoints.extract.unit_queue import Progress, UnitQueue
from vllm.exceptions import Failure, FailureError, FailureKind, kind_of
from vllm.hidden_states.metadata import DatasetSettings, UnitRecord
from vllm.hidden_states.sample import (
    ExtractRequest,
    FailedSample,
    HiddenStatesError,
    HiddenStatesSample,
)
from vllm.hidden_states.units import UnitWriter, open_unit_writer
from vllm.ops.sources import kernels_of
from vllm.platforms import get_platform

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

_SKIPPED_AS = dict.fromkeys(
    (
        *(FailureKind.BAD_REQUEST, FailureKind.ROWS_NOT_FINITE, FailureKind.ROWS_ALL_ZERO),
        *(FailureKind.STEP_FAILED, FailureKind.OUT_OF_MEMORY, FailureKind.ABORTED),
        FailureKind.LOGITS_NOT_FINITE,
    ),
    "engine",
)
"""Failures of a single sample -> the kind in its skip reason; any other failure ends the job,
whatever ``--on-error`` says."""
_REPORT_SECONDS = 0.2
_CLAIM_SECONDS = 0.2
_LISTED_ID_BYTES = 40
"""Bytes of a token id in a list. With few rows per sample, ids are most of the waiting bytes."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes of rows and tokens that wait for the disk; one sample may always wait."""

Result = HiddenStatesSample | FailedSample
LoadEngine = Callable[[EngineArgs], "LLM"]


@dataclass(frozen=True)
class Repair:
    """A committed unit of which some samples are made again."""

    record: UnitRecord
    samples: Sequence[int]


@dataclass(frozen=True)
class WorkerJob:
    """All data that a worker needs; it can be pickled."""

    directory: Path
    settings: DatasetSettings
    engine_args: EngineArgs
    load_engine: LoadEngine
    on_error: Literal["skip", "fail"]
    mixes_kernels: bool = False
    repairs: Mapping[int, Repair] = field(default_factory=dict)
    """Units of which only these samples are to be done."""
    sampling: SamplingParams | None = None
    """Settings of the text that continues each prompt, without a seed; None: there is none."""
    seed: int = 0

    def samples_of(self, plan: Plan, unit: int) -> Sequence[int]:
        """Return the samples of a unit that are to be done."""
        return self.repairs[unit].samples if unit in self.repairs else plan.samples_of(unit)

    def here(self) -> WorkerJob:
        """Return the job for this machine; raises ValueError if it has other kernels than the
        dataset."""
        device_type = get_platform(self.engine_args.device).device_type
        settings = self.settings.with_kernels(kernels_of(device_type))
        for difference in self.settings.differences(settings, mixes_kernels=self.mixes_kernels):
            raise ValueError(difference)
        return dataclasses.replace(self, settings=settings)


class _Item(NamedTuple):
    """A sample on its way to the disk."""

    planned: PlannedSample
    unit: int
    samples: Sequence[int]
    """Numbers of the samples of the unit that are to be done."""
    result: Result

    @property
    def is_last(self) -> bool:
        """True if it is the last sample of its unit."""
        return self.planned.sample == self.samples[-1]


def run_worker(number: int, job: WorkerJob, queue: UnitQueue) -> None:
    """Do units until there are none.

    Raises OSError if the disk is full or cannot be written; FailureError if a sample failed and
    the job must not skip it. Units that are not committed leave nothing behind.
    """
    plan, job = Plan(job.directory / PLAN_FOLDER), job.here()
    with (
        job.load_engine(job.engine_args) as engine,
        closing(_UnitWriting(number, job, queue)) as writing,
        _WriterThread(writing.write) as thread,
    ):
        while True:
            # The stream of prompts must not wait for a unit: that would keep the engine from
            # finishing the prompts it has.
            units = iter(partial(queue.claim, number), None)
            for item in _results(engine, job, plan, units):
                thread.put(item)
            thread.drain()
            if queue.is_finished():
                return
            time.sleep(_CLAIM_SECONDS)  # other workers have the rest, and may still die


def _results(engine: LLM, job: WorkerJob, plan: Plan, units: Iterator[int]) -> Iterator[_Item]:
    """Yield the results of units in order."""
    settings = job.settings
    under_way: deque[tuple[PlannedSample, int, Sequence[int]]] = deque()

    def requests() -> Iterator[ExtractRequest]:
        for unit in units:
            samples = job.samples_of(plan, unit)
            for planned in map(plan.sample, samples):
                under_way.append((planned, unit, samples))
                prompt = {"prompt_token_ids": planned.token_ids}
                params = job.sampling
                if params is not None:
                    params = params_of(params, job.seed, planned.record, planned.columns)
                yield ExtractRequest(prompt, mask=planned.mask, sampling_params=params)

    for result in engine.extract(
        requests(),
        settings.layer_ids or None,
        settings.positions,
        settings.dtype,
        ordered=True,
        on_error="yield",
        pooling=settings.pooling,
        **settings.request_options,
    ):
        yield _Item(*under_way.popleft(), result)
    assert not under_way, f"{len(under_way)} samples were lost"


class _WriterThread:
    """Calls ``write`` with each item, in order, on one thread.

    It is a context manager: the exit waits until everything is written; after an exception it
    drops the items that wait. An exception of ``write`` is raised by a later call, or by the exit.
    Nothing is written after an item that failed or was dropped.
    """

    def __init__(self, write: Callable[[_Item], None]) -> None:
        self._write = write
        self._executor = ThreadPoolExecutor(1, "extract-writer")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0
        self._last: Future[None] | None = None

    def put(self, item: _Item) -> None:
        """Hand over an item; waits while earlier items hold too much memory."""
        num_bytes = _LISTED_ID_BYTES * len(item.planned.token_ids)
        if isinstance(item.result, HiddenStatesSample):
            num_bytes += item.result.nbytes
        self._wait_for(max(0, MAX_WAITING_BYTES - num_bytes))
        self._last = self._executor.submit(self._write_after, self._last, item)
        self._waiting.append((self._last, num_bytes))
        self._waiting_bytes += num_bytes

    def drain(self) -> None:
        """Wait until everything is written."""
        self._wait_for(-1)

    def _wait_for(self, most_bytes: int) -> None:
        while self._waiting and (self._waiting_bytes > most_bytes or self._waiting[0][0].done()):
            written, num_bytes = self._waiting.popleft()
            self._waiting_bytes -= num_bytes
            written.result()

    def _write_after(self, before: Future[None] | None, item: _Item) -> None:
        if before is not None:
            before.result()
        self._write(item)

    def __enter__(self) -> _WriterThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self._executor.shutdown(cancel_futures=True)


class _UnitWriting:
    """Writes items into their units, on the writer's thread."""

    def __init__(self, number: int, job: WorkerJob, queue: UnitQueue) -> None:
        self._number = number
        self._job = job
        self._queue = queue
        self._writer: UnitWriter | None = None
        self._awaited: Iterator[int] = iter(())  # numbers of the unit's samples
        self._unreported = Progress()
        self._reported_at = 0.0

    def write(self, item: _Item) -> None:
        started, job = time.perf_counter(), self._job
        if self._writer is None:
            repair = job.repairs.get(item.unit)
            record = None if repair is None else repair.record
            self._writer = open_unit_writer(str(job.directory), item.unit, job.settings, record)
            self._awaited = iter(item.samples)
        expected = next(self._awaited)
        if self._writer.unit != item.unit or item.planned.sample != expected:
            raise AssertionError(f"sample {item.planned.sample} came instead of {expected}")
        self._append(self._writer, item)
        if item.is_last:
            self._writer.commit()
            self._writer = None
        now = time.perf_counter()
        progress = Progress(1, len(item.planned.token_ids), now - started)
        self._unreported = self._unreported.plus(progress)
        if item.is_last or now - self._reported_at >= _REPORT_SECONDS:
            self._queue.report(self._number, self._unreported)
            self._unreported, self._reported_at = Progress(), now
        if item.is_last:
            self._queue.commit(self._number, item.unit)

    def _append(self, writer: UnitWriter, item: _Item) -> None:
        planned, result = item.planned, item.result
        if isinstance(result, FailedSample):
            failure = result.failure
        else:
            if result.token_ids[: result.num_prompt_tokens].tolist() != planned.token_ids:
                raise AssertionError(f"sample {planned.sample}: the rows are of other tokens")
            try:
                columns = planned.columns
                if self._job.sampling is not None:
                    columns = with_answer(columns, result)
                result = dataclasses.replace(result, columns=columns)
                writer.append(result, planned.sample, planned.record, planned.name or None)
                return
            except HiddenStatesError as error:
                failure = error.failure
        kind = _SKIPPED_AS.get(failure.kind)
        if kind is None or self._job.on_error == "fail" or writer.repaired is not None:
            raise _ended(planned, failure, kind is not None and writer.repaired is None)
        writer.skip(planned.sample, planned.record, f"{kind}: {failure}")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()


def samples_to_publish(engine: LLM, job: WorkerJob, plan: Plan) -> Iterator[Result]:
    """Yield every sample of a job with its record and columns.

    Raises FailureError if a sample failed and the job must not skip it.
    """
    for item in _results(engine, job, plan, iter(range(job.settings.num_units))):
        planned, result = item.planned, item.result
        if isinstance(result, FailedSample):
            is_skipped = result.failure.kind in _SKIPPED_AS
            if not is_skipped or job.on_error == "fail":
                raise _ended(planned, result.failure, is_skipped)
            yield dataclasses.replace(result, index=planned.sample)
            continue
        columns = planned.columns if job.sampling is None else with_answer(planned.columns, result)
        yield dataclasses.replace(
            result, index=planned.sample, record=planned.record, columns=columns
        )


def _ended(planned: PlannedSample, failure: Failure, may_skip: bool) -> FailureError:
    advice = "; use --on-error skip to continue without it" if may_skip else ""
    message = f"sample {planned.sample} (record {planned.record}): {failure}{advice}"
    return FailureError(Failure(FailureKind.JOB_FAILED, message))


def why_ended(error: BaseException) -> Failure:
    """Return the reason why a job ended early, with advice."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(FailureKind.ABORTED, "interrupted; run the same command again to resume")
    kind = kind_of(error, FailureKind.JOB_FAILED)
    message = str(error) or type(error).__name__
    if isinstance(error, ValueError):
        kind = FailureKind.BAD_REQUEST
    elif kind is FailureKind.DISK_FULL:
        message = (
            f"the disk is full ({error}). Finished units are kept: free some space, and run the "
            "same command again"
        )
    elif isinstance(error, OSError) and error.errno == errno.EFBIG:
        message = (
            f"a file would be larger than this process may write ({error}). Finished units are "
            "kept: raise the limit (ulimit -f), and run the same command again"
        )
    elif isinstance(error, IsADirectoryError):
        message = (
            f"{error.filename2 or error.filename} is a folder, where the dataset has a file: move "
            "it away, and run the same command again"
        )
    return Failure(kind, message)
