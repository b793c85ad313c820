"""The job: input -> plan -> units -> finished dataset. It resumes an earlier one that ended."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.folder import (
    check_disk,
    lock_folder,
    output_folder,
    remove_rubbish,
)
from vllm.entrypoints.extract.generation import sampling_of
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.plan import PLAN_FOLDER, Plan, has_plan, make_plan
from vllm.entrypoints.extract.records import STDIN, Source, find_sources, input_digest
from vllm.entrypoints.extract.resolve import Resolved
from vllm.entrypoints.extract.summary import (
    Lines,
    ProgressBar,
    plan_lines,
    print_table,
    settings_lines,
    totals_lines,
)
from vllm.entrypoints.extract.unit_queue import UnitQueue
from vllm.entrypoints.extract.worker import (
    MAX_WAITING_BYTES,
    LoadEngine,
    Repair,
    WorkerJob,
    run_worker,
    samples_to_publish,
)
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.hidden_states import metadata as records
from vllm.hidden_states.manifest import (
    add_input,
    continue_settings,
    index_is_sound,
    merge_units,
    read_skipped,
    start_dataset,
    sum_units,
)
from vllm.hidden_states.metadata import DatasetSettings, SkippedRecord, UnitRecord
from vllm.hidden_states.units import find_repair
from vllm.hidden_states.verify import unit_problems, verify_unit
from vllm.logger import init_logger
from vllm.training.hidden_states_stream import HiddenStatesStream
from vllm.utils.disk import free_bytes
from vllm.utils.mem_utils import format_bytes
from vllm.utils.progress import progress_bar
from vllm.utils.weight_files import find_weight_files
from vllm.utils.whole_files import remove_folder, temporary_path

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

logger = init_logger(__name__)

_CHECKING_THREADS = 4
_COPY_BYTES = 1 << 20


def load_llm(engine_args: EngineArgs) -> LLM:
    """Load the engine of a worker."""
    from vllm.entrypoints.llm import LLM

    args = dataclasses.replace(engine_args, data_parallel_size=1)
    return LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})


def run_job(
    options: ExtractOptions, engine_args: EngineArgs, load_engine: LoadEngine = load_llm
) -> int:
    """Run ``vllm extract``; returns the exit status.

    Raises ValueError if options, input or model are wrong, or the folder holds another dataset;
    OSError or FailureError if the job ended early, which the same command continues.
    """
    if options.stream is not None:
        publish_samples(Resolved(options, engine_args), options.stream, load_engine)
        return 0
    assert options.output is not None, "checked by ExtractOptions"
    directory = Path(options.output).expanduser()
    if options.merge:
        with lock_folder(directory, fcntl.LOCK_EX):
            _merge(directory, options.mixed_kernels)
        return 0
    resolved = Resolved(options, engine_args)
    resolved.check_model()
    _check_workers(options, engine_args)
    if options.dry_run:
        _dry_run(resolved, directory)
        return 0
    with output_folder(directory, options.world_size):
        _Job(resolved, directory, load_engine).run()
    if not options.verify:
        return 0
    from vllm.entrypoints.extract.recompute import verify_samples

    model_config = resolved.vllm_config.model_config
    seed, points = engine_args.seed, resolved.points
    return verify_samples(directory, options.verify, seed, model_config, points)


@dataclass(frozen=True)
class _Job:
    """One run in a folder in which only other ranks may work at the same time."""

    resolved: Resolved
    directory: Path
    load_engine: LoadEngine

    @property
    def options(self) -> ExtractOptions:
        return self.resolved.options

    def run(self) -> None:
        lines = Lines()
        with _sources(self.options, self.directory) as sources:
            digest = input_digest(sources)
            settings = _settings(self.resolved, self.directory, digest)
            if not settings.units_of(digest):
                plan = self._open_plan(sources, settings, digest)
                settings = plan.complete(settings)
                self._check_disk(plan, self._mine(settings.units_of(digest)), settings)
                if settings.added:
                    add_input(str(self.directory), settings)
            units = self._mine(settings.units_of(digest))
            print_table("Settings", settings_lines(settings))
            committed = start_dataset(
                str(self.directory), settings, mixes_kernels=self.options.mixed_kernels
            )
            todo, repairs = self._units_to_do(settings, units, committed)
            if todo:
                plan = self._open_plan(sources, settings, digest)
                whole = [record for record in committed if record.unit not in todo]
                _check_plan(plan, settings, digest, whole)
                self._check_disk(plan, todo, settings)
        if todo:
            print_table("Plan", plan_lines(plan.totals, len(plan.units)))
            logger.info("%d of %d units remain to be done", len(todo), settings.num_units)
            lines = self._extract(settings, plan, todo, repairs)
        own = settings.units_of(digest)
        self._check_other_inputs([record for record in committed if record.unit not in own])
        if self.options.world_size == 1:
            _finish(self.directory, lines)
        else:
            self._finish_rank(settings, lines)

    def _mine(self, units: range) -> list[int]:
        """Return the units of this rank."""
        return [unit for unit in units if unit % self.options.world_size == self.options.rank]

    def _open_plan(self, sources: list[Source], settings: DatasetSettings, digest: str) -> Plan:
        return _open_plan(self.directory, self.directory, sources, self.resolved, settings, digest)

    def _check_disk(self, plan: Plan, units: Sequence[int], settings: DatasetSettings) -> None:
        if self.options.check_disk:
            check_disk(self.directory, plan, units, settings)

    def _units_to_do(
        self, settings: DatasetSettings, mine: list[int], committed: list[UnitRecord]
    ) -> tuple[list[int], dict[int, Repair]]:
        """Return the units of this rank that are missing or damaged, and those of them of which
        some files are whole."""
        is_full = self.options.resume_check == "full"
        if not index_is_sound(str(self.directory)):
            if settings.added:
                raise ValueError(
                    f"{self.directory / records.INDEX_FILE} is damaged, and the dataset has "
                    "several inputs; restore the file from a copy"
                )
            logger.warning("%s is damaged: every unit is done again", records.INDEX_FILE)
            (self.directory / records.INDEX_FILE).unlink()
            committed = []
        known = [record for record in committed if record.unit in mine]
        todo, repairs = set(mine), {}
        with ThreadPoolExecutor(_CHECKING_THREADS) as threads:
            found = threads.map(lambda one: unit_problems(str(self.directory), one, is_full), known)
            total = len(known)
            bar = progress_bar(found, total=total, desc="Checking", unit=" units", leave=False)
            for record, problems in zip(known, bar, strict=True):
                if not problems:
                    todo.remove(record.unit)
                    continue
                samples = find_repair(record, _stored_samples(record), problems, settings)
                what = f"unit {record.unit} is done again"
                if samples is not None:
                    repairs[record.unit] = Repair(record, samples)
                    what = f"{len(samples)} files of unit {record.unit} are made again"
                lines = [line for some in problems.values() for line in some]
                logger.warning("%s: %s", what, "; ".join(lines))
        return sorted(todo), repairs

    def _check_other_inputs(self, others: list[UnitRecord]) -> None:
        """Raise FailureError if files that the commands of other inputs made are not there."""
        found = [unit_problems(str(self.directory), record, full=False) for record in others]
        problems = [line for one in found for lines in one.values() for line in lines]
        if problems:
            raise FailureError(
                Failure(
                    FailureKind.JOB_FAILED,
                    f"what this input needs is done, but files of other inputs are missing or "
                    f"damaged: {'; '.join(problems[:3])}{'; ...' if problems[3:] else ''}; run the "
                    "command of the input that they came from, too",
                )
            )

    def _extract(
        self, settings: DatasetSettings, plan: Plan, todo: list[int], repairs: dict[int, Repair]
    ) -> Lines:
        job = _worker_job(self.directory, settings, self.resolved, plan, self.load_engine, repairs)
        num_tokens = sum(plan.num_tokens(job.samples_of(plan, unit)) for unit in todo)
        num_samples = sum(len(job.samples_of(plan, unit)) for unit in todo)
        bar = ProgressBar(num_tokens, num_samples, job.engine_args.data_parallel_size)
        records.remove_temporary_files(str(self.directory), todo)  # left by a killed run
        try:
            self._run_workers(job, todo, bar)
        except BaseException:
            records.remove_temporary_files(str(self.directory), todo)
            raise
        finally:
            bar.close()
        return bar.lines()

    def _run_workers(self, job: WorkerJob, todo: list[int], bar: ProgressBar) -> None:
        num_workers = job.engine_args.data_parallel_size
        if self.options.distributed == "ray":
            from vllm.entrypoints.extract.ray_workers import run_ray

            run_ray(job, num_workers, todo, bar.show, self.options.ray_address)
        elif num_workers > 1:
            from vllm.entrypoints.extract.processes import run_processes

            run_processes(job, num_workers, todo, bar.show)
        else:
            run_worker(0, job, UnitQueue(todo, bar.show))

    def _finish_rank(self, settings: DatasetSettings, lines: Lines) -> None:
        rank, size = self.options.rank, self.options.world_size
        committed = records.read_unit_records(str(self.directory))
        mine = [record for record in committed if record.unit % size == rank]
        reasons = [skipped.reason for record in mine for skipped in record.skipped]
        table = totals_lines(settings, sum_units(mine), reasons, None)
        print_table(f"Rank {rank} of {size}", [*table, *lines])
        print(f"When all ranks are done: vllm extract --merge --output {self.directory}")


def _check_plan(
    plan: Plan, settings: DatasetSettings, digest: str, whole: list[UnitRecord]
) -> None:
    """Raise ValueError if a plan that was made again is not the one of the ``whole`` units."""
    units = settings.units_of(digest)
    made = {one.unit: range(one.first_sample, one.last_sample + 1) for one in whole}
    starts = {one.first_unit: one.first_sample for one in settings.added}
    first, end = plan.totals.first_sample, starts.get(units.stop, settings.num_samples)
    is_same = (plan.units, plan.totals.num_samples) == (units, end - first)
    if not is_same or any(
        plan.samples_of(one) != made.get(one, plan.samples_of(one)) for one in units
    ):
        raise ValueError(
            f"the input makes {plan.totals.num_samples} samples in {len(plan.units)} units, and "
            f"the dataset was begun with {end - first} in {len(units)}, which begin elsewhere: "
            "another version read the input in another way, or the chat template writes the date; "
            "use a new --output"
        )


def _check_workers(options: ExtractOptions, engine_args: EngineArgs) -> None:
    """Raise ValueError if workers cannot have such engines."""
    count, backend = engine_args.data_parallel_size, engine_args.distributed_executor_backend
    if options.distributed == "ray" and engine_args.nnodes > 1:
        raise ValueError(
            f"distributed='ray' with nnodes={engine_args.nnodes}: leave nnodes out; with "
            "distributed_executor_backend='ray' the ranks of a worker may be on several nodes"
        )
    if options.distributed == "processes" and backend == "ray" and count > 1:
        raise ValueError(
            f"distributed_executor_backend='ray' with data_parallel_size={count} needs "
            "distributed='ray', which places the workers, too"
        )


def _worker_job(
    directory: Path,
    settings: DatasetSettings,
    resolved: Resolved,
    plan: Plan,
    load_engine: LoadEngine,
    repairs: dict[int, Repair],
) -> WorkerJob:
    options = resolved.options
    engine_args = dataclasses.replace(
        resolved.engine_args,
        max_model_len=plan.totals.longest,
        skip_tokenizer_init=not options.generate,  # it gets token ids
    )
    return WorkerJob(
        directory,
        settings,
        engine_args,
        load_engine,
        options.on_error,
        options.mixed_kernels,
        repairs,
        sampling_of(options.sampling) if options.generate else None,
        engine_args.seed,
    )


def publish_samples(resolved: Resolved, path: str, load_engine: LoadEngine) -> None:
    """Publish the samples to the reader of a stream instead of storing them.

    Raises ValueError if options, input or model are wrong; FailureError if the job ended early,
    for example because the reader stopped reading.
    """
    resolved.check_model()
    if resolved.engine_args.data_parallel_size > 1:
        raise ValueError("data_parallel_size: has to be 1 with stream, which one engine publishes")
    options = resolved.options
    with (
        tempfile.TemporaryDirectory() as scratch,
        HiddenStatesStream(path, timeout=options.stream_timeout) as stream,
    ):
        folder = Path(scratch)
        with _sources(options, folder) as sources:
            digest = input_digest(sources)
            settings = resolved.settings(digest)
            plan = _open_plan(folder, folder, sources, resolved, settings, digest)
        settings = plan.complete(settings)
        print_table("Plan", plan_lines(plan.totals, len(plan.units)))
        job = _worker_job(folder, settings, resolved, plan, load_engine, {})
        with load_engine(job.engine_args) as engine:
            count = stream.publish(samples_to_publish(engine, job, plan))
    print(f"{path}: the reader took {count} samples")


def _stored_samples(record: UnitRecord) -> list[int]:
    """Return the samples of a unit that were not skipped."""
    skipped = {one.sample for one in record.skipped}
    return [n for n in range(record.first_sample, record.last_sample + 1) if n not in skipped]


def _merge(directory: Path, mixes_kernels: bool) -> None:
    if not (directory / records.MANIFEST_FILE).exists() and not (directory / PLAN_FOLDER).exists():
        raise ValueError(
            f"--output {directory}: it has no {PLAN_FOLDER} folder; copy the one of any rank"
        )
    units = records.read_unit_records(str(directory))
    for unit in units:
        for problem in verify_unit(str(directory), unit, full=False):
            raise ValueError(f"{problem}; copy it, or run the command of its rank again")
    kernels = sorted({unit.kernels for unit in units} - {""})
    if len(kernels) > 1 and not mixes_kernels:
        raise ValueError(
            f"units were computed by different kernels ({'; '.join(kernels)}), so rows differ in "
            "their last bits between machines; use --mixed-kernels to merge them anyway"
        )
    _finish(directory, [])


def _finish(directory: Path, lines: Lines) -> None:
    """Write index and manifest of a dataset with all units, and remove plan and leftovers."""
    name, plan_totals = str(directory), None
    _check_samples(directory, records.read_unit_records(name))
    settings, skipped = DatasetSettings.read(name), list[SkippedRecord]()
    if (directory / records.INDEX_FILE).exists():
        skipped = [one for one in read_skipped(name) if one.sample is None]
    if (directory / PLAN_FOLDER).exists():
        plan = Plan(directory / PLAN_FOLDER)
        plan_totals = plan.totals
        records_of_plan = _records_of(plan, settings)
        skipped = [one for one in skipped if one.record not in records_of_plan] + plan.skipped()
    totals = merge_units(name, sorted(skipped, key=lambda one: one.record))
    remove_rubbish(directory)
    remove_folder(directory / PLAN_FOLDER)
    reasons = [one.reason for one in read_skipped(name)]
    table = totals_lines(settings, totals, reasons, plan_totals)
    print_table(f"Dataset in {directory}", [*table, *lines])


def _check_samples(directory: Path, units: list[UnitRecord]) -> None:
    """Raise FailureError if no unit has a sample."""
    if units and not any(map(_stored_samples, units)):
        reason = units[0].skipped[0].reason
        raise FailureError(
            Failure(
                FailureKind.JOB_FAILED,
                f"all {sum(len(unit.skipped) for unit in units)} samples were skipped; the first: "
                f"{reason}; remove {directory} to compute them again",
            )
        )


def _records_of(plan: Plan, settings: DatasetSettings) -> range:
    """Return the records of a plan's input: up to the first one of the next input."""
    starts = [one.first_record for one in settings.inputs]
    after = (start for start in starts if start > plan.totals.first_record)
    return range(plan.totals.first_record, min(after, default=sys.maxsize))


def _dry_run(resolved: Resolved, directory: Path) -> None:
    """Print the plan, and write nothing; raises ValueError if the disk has too little room."""
    with tempfile.TemporaryDirectory() as scratch:
        with _sources(resolved.options, Path(scratch)) as sources:
            digest = input_digest(sources)
            settings = _settings(resolved, directory, digest)
            plan = _open_plan(Path(scratch), directory, sources, resolved, settings, digest)
        is_new = not settings.units_of(digest)
        settings = plan.complete(settings) if is_new else settings
        print_table("Settings", settings_lines(settings))
        lines = [
            *plan_lines(plan.totals, len(plan.units)),
            ("free on the disk", format_bytes(free_bytes(directory))),
            ("skipped", str(plan.totals.num_skipped)),
        ]
        print_table("Plan", [*lines, *_memory_lines(resolved)])
        done = set()
        if (directory / records.SETTINGS_FILE).exists():
            if not is_new:
                mixes_kernels = resolved.options.mixed_kernels
                start_dataset(str(directory), settings, mixes_kernels=mixes_kernels)
            done = {record.unit for record in records.read_unit_records(str(directory))}
            print(f"{directory} would be resumed: {len(done)} of {settings.num_units} units exist")
        if resolved.options.check_disk:
            check_disk(directory, plan, sorted({*plan.units} - done), settings)


def _memory_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """Return the memory of one engine, as far as it is known without starting the engine."""
    config = resolved.vllm_config
    folder = Path(config.model_config.model)
    load_format = config.load_config.load_format
    is_read = folder.is_dir() and load_format != "dummy"
    files = find_weight_files(folder, load_format) if is_read else ()
    weights = sum(path.stat().st_size for path in files)
    pool = config.cache_config.kv_cache_memory_bytes
    utilization = config.cache_config.gpu_memory_utilization
    budget = pool or config.device_config.platform.kv_cache_budget_bytes(utilization)
    return [
        ("weights", format_bytes(weights) if weights else "not on this machine yet"),
        ("pool", f"up to {format_bytes(int(budget))}"),
        ("rows waiting for the disk", f"up to {format_bytes(MAX_WAITING_BYTES)}"),
    ]


def _settings(resolved: Resolved, directory: Path, digest: str) -> DatasetSettings:
    """Return the settings of the whole dataset in the folder, with this input."""
    return continue_settings(
        str(directory),
        resolved.settings(digest),
        appends=resolved.options.append,
        mixes_kernels=resolved.options.mixed_kernels,
    )


def _open_plan(
    place: Path,
    directory: Path,
    sources: list[Source],
    resolved: Resolved,
    settings: DatasetSettings,
    digest: str,
) -> Plan:
    """Open or make the plan of one input of the dataset in ``directory``; it is in ``place``."""
    folder, own = place / PLAN_FOLDER, settings.of_input(digest)
    if has_plan(folder, own):
        return Plan(folder)
    is_begun = (directory / records.SETTINGS_FILE).exists() and settings.units_of(digest)
    stores = settings.has_loss_mask if is_begun else resolved.options.stores_loss_mask
    others: list[str] = []
    if settings.added and resolved.options.id_column is not None:
        units = records.read_unit_records(str(directory))
        mine = settings.units_of(digest)
        others = [file.name for unit in units if unit.unit not in mine for file in unit.files]
    names = (name.removesuffix(".safetensors") for name in others)
    return make_plan(folder, sources, resolved.prompt_maker(stores), own, names, digest)


@contextmanager
def _sources(options: ExtractOptions, directory: Path) -> Iterator[list[Source]]:
    """Yield the files of the input; standard input is copied to a file inside the block."""
    if options.input.count(STDIN) > 1:
        named = " ".join(options.input)
        raise ValueError(f"--input {named} cannot be read: standard input is there only once")
    with ExitStack() as stack:
        sources: list[Source] = []
        for name in options.input:
            if name != STDIN:
                output = Path(options.output or "").expanduser()
                sources += find_sources([name], options.input_format, output)
                continue
            spool = Path(temporary_path(directory / "stdin"))
            stack.callback(spool.unlink, missing_ok=True)
            if sys.stdin is None:  # closed by the shell
                raise ValueError(f"--input {STDIN}: standard input is closed; pipe records into it")
            with spool.open("xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, _COPY_BYTES)
            form = "jsonl" if options.input_format == "auto" else options.input_format
            sources.append(Source(spool, form, is_stdin=True))
        yield sources
