"""The run: input -> plan -> units -> finished dataset. It goes on where an earlier one ended."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.folder import (
    PLAN_FOLDER,
    check_is_ours,
    index_is_sound,
    lock_folder,
    remove_rubbish,
)
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.plan import BUILDING_PREFIX, Plan, has_plan, make_plan
from vllm.entrypoints.extract.records import (
    STDIN,
    Source,
    find_sources,
    input_digest,
)
from vllm.entrypoints.extract.resolve import Resolved
from vllm.entrypoints.extract.summary import (
    ProgressBar,
    plan_lines,
    print_table,
    settings_lines,
    totals_lines,
)
from vllm.entrypoints.extract.units import Progress, UnitQueue
from vllm.entrypoints.extract.worker import (
    Extractor,
    LoadEngine,
    WorkerJob,
    run_worker,
)
from vllm.hidden_states import records
from vllm.hidden_states.manifest import merge_units, read_skipped, start_dataset, sum_units
from vllm.hidden_states.records import DatasetSettings, SkippedRecord, UnitRecord
from vllm.hidden_states.verify import verify_unit
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_bytes

logger = init_logger(__name__)

_CHECKING_THREADS = 4
_COPY_BYTES = 1 << 20


def load_llm(engine_args: EngineArgs) -> Extractor:
    """The engine of a worker. It gets token ids only."""
    from vllm.entrypoints.llm import LLM

    options = {
        field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)
    }
    return LLM(**{**options, "skip_tokenizer_init": True, "data_parallel_size": 1})


def run_job(
    options: ExtractOptions, engine_args: EngineArgs, load_engine: LoadEngine = load_llm
) -> int:
    """Run ``vllm extract``; returns the exit status.

    ValueError: options, input or model are wrong, or the folder holds another dataset.
    OSError, RuntimeError: the job ended early; the same command continues it.
    """
    assert options.output is not None, "checked by ExtractOptions"
    directory = Path(options.output).expanduser()
    if options.merge:
        with lock_folder(directory, fcntl.LOCK_EX):
            return _merge(directory)
    resolved = Resolved(options, engine_args)
    if options.dry_run:
        return _dry_run(resolved, directory)
    directory.mkdir(parents=True, exist_ok=True)
    is_alone = options.world_size == 1
    with lock_folder(directory, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH):
        check_is_ours(directory)
        if is_alone:
            remove_rubbish(directory)
        status = _Job(resolved, directory, load_engine).run()
    if status == 0 and options.verify and is_alone:
        from vllm.entrypoints.extract.recompute import verify_samples

        model_config = resolved.vllm_config.model_config
        return verify_samples(directory, options.verify, engine_args.seed, model_config)
    return status


class _Job:
    """One run in a folder that nobody else works in (but other ranks)."""

    def __init__(self, resolved: Resolved, directory: Path, load_engine: LoadEngine) -> None:
        self._resolved = resolved
        self._options = resolved.options
        self._directory = directory
        self._load_engine = load_engine
        self._num_workers = resolved.engine_args.data_parallel_size

    def run(self) -> int:
        with _sources(self._options, self._directory) as sources:
            settings, plan = self._settle(sources)
            print_table("Settings", settings_lines(settings))
            committed = start_dataset(str(self._directory), settings)
            todo = self._units_to_do(settings, committed)
            if todo:
                plan = plan or self._plan(sources, settings)
        bar = None
        if todo:
            assert plan is not None
            print_table("Plan", plan_lines(plan.totals, plan.num_units))
            logger.info("%d of %d units are to be done", len(todo), settings.num_units)
            bar = self._extract(settings, plan, todo)
        return self._finish(settings, bar)

    def _settle(self, sources: list[Source]) -> tuple[DatasetSettings, Plan | None]:
        """The settings, with the counts of the dataset that is there, or else of a new plan."""
        digest = input_digest(sources)
        if (self._directory / records.SETTINGS_FILE).exists():
            there = DatasetSettings.read(str(self._directory))
            return self._resolved.settings(digest, there.num_units, there.num_samples), None
        settings = self._resolved.settings(digest, 0, 0)
        plan = self._plan(sources, settings)
        num_samples = plan.totals.num_samples
        return dataclasses.replace(
            settings, num_units=plan.num_units, num_samples=num_samples
        ), plan

    def _plan(self, sources: list[Source], settings: DatasetSettings) -> Plan:
        return _open_plan(self._directory / PLAN_FOLDER, sources, self._resolved, settings)

    def _units_to_do(self, settings: DatasetSettings, committed: list[UnitRecord]) -> list[int]:
        """The units of this rank that are not there, or not whole."""
        mine = range(self._options.rank, settings.num_units, self._options.world_size)
        is_full = self._options.resume_check == "full"
        if not index_is_sound(self._directory):
            logger.warning("%s is damaged: every unit is done again", records.INDEX_FILE)
            (self._directory / records.INDEX_FILE).unlink()
            committed = []
        known = [record for record in committed if record.unit in mine]
        sound = set()
        with ThreadPoolExecutor(_CHECKING_THREADS) as threads:
            found = threads.map(lambda one: verify_unit(str(self._directory), one, is_full), known)
            bar = tqdm(found, total=len(known), desc="Checking", unit=" units", leave=False)
            for record, problems in zip(known, bar, strict=True):
                if problems:
                    logger.warning("unit %d is done again: %s", record.unit, "; ".join(problems))
                else:
                    sound.add(record.unit)
        return [unit for unit in mine if unit not in sound]

    def _extract(self, settings: DatasetSettings, plan: Plan, todo: list[int]) -> ProgressBar:
        engine_args = dataclasses.replace(
            self._resolved.engine_args, max_model_len=plan.totals.longest
        )
        job = WorkerJob(
            self._directory,
            settings,
            engine_args,
            self._load_engine,
            self._options.on_error,
        )
        num_tokens = sum(plan.num_tokens(unit) for unit in todo)
        num_samples = sum(len(plan.samples_of(unit)) for unit in todo)
        bar = ProgressBar(num_tokens, num_samples, self._num_workers)
        records.remove_temporary_files(str(self._directory), todo)  # of a run that was killed
        try:
            self._run_workers(job, todo, bar)
        except BaseException:
            records.remove_temporary_files(str(self._directory), todo)
            raise
        finally:
            bar.close()
        return bar

    def _run_workers(self, job: WorkerJob, todo: list[int], bar: ProgressBar) -> None:
        if self._options.distributed == "ray":
            from vllm.entrypoints.extract.ray_workers import run_ray

            run_ray(job, self._num_workers, todo, bar.show)
        elif self._num_workers > 1:
            from vllm.entrypoints.extract.processes import run_processes

            run_processes(job, self._num_workers, UnitQueue(todo), bar.show)
        else:
            run_worker(0, job, _ShownQueue(todo, bar))

    def _finish(self, settings: DatasetSettings, bar: ProgressBar | None) -> int:
        lines = [] if bar is None else list(bar.lines())
        if self._options.world_size == 1:
            return _finish(self._directory, lines)
        rank, size = self._options.rank, self._options.world_size
        there = records.read_unit_records(str(self._directory))
        mine = [record for record in there if record.unit % size == rank]
        reasons = [skipped.reason for record in mine for skipped in record.skipped]
        table = totals_lines(settings, sum_units(mine), reasons, None)
        print_table(f"Rank {rank} of {size}", [*table, *lines])
        print(f"When all ranks are done: vllm extract --merge --output {self._directory}")
        return 0


class _ShownQueue(UnitQueue):
    """A queue in the worker's own process."""

    def __init__(self, units: list[int], bar: ProgressBar) -> None:
        super().__init__(units)
        self._bar = bar

    def report(self, worker: int, progress: Progress) -> None:
        super().report(worker, progress)
        self._bar.show(self.progress())


def _merge(directory: Path) -> int:
    if not (directory / records.MANIFEST_FILE).exists() and not (directory / PLAN_FOLDER).exists():
        raise ValueError(
            f"--output {directory}: there is no {PLAN_FOLDER} folder in it; copy that of any rank"
        )
    return _finish(directory, [])


def _finish(directory: Path, lines: list[tuple[str, str]]) -> int:
    """Every unit is there: write index and manifest, remove what only the work needed."""
    name = str(directory)
    settings = DatasetSettings.read(name)
    num_truncated: int | None = None
    if (directory / PLAN_FOLDER).exists():
        plan = Plan(directory / PLAN_FOLDER)
        skipped = [SkippedRecord(record, reason) for record, reason in plan.skipped()]
        num_truncated = plan.totals.num_truncated
    else:
        skipped = [one for one in read_skipped(name) if one.sample is None]
    totals = merge_units(name, skipped)
    remove_rubbish(directory)
    shutil.rmtree(directory / PLAN_FOLDER, ignore_errors=True)
    reasons = [one.reason for one in read_skipped(name)]
    table = totals_lines(settings, totals, reasons, num_truncated)
    print_table(f"Dataset in {directory}", [*table, *lines])
    return 0


def _dry_run(resolved: Resolved, directory: Path) -> int:
    """Nothing is written to the dataset's folder."""
    with tempfile.TemporaryDirectory() as scratch:
        with _sources(resolved.options, Path(scratch)) as sources:
            settings = resolved.settings(input_digest(sources), 0, 0)
            plan = _open_plan(Path(scratch) / PLAN_FOLDER, sources, resolved, settings)
        settings = dataclasses.replace(
            settings, num_units=plan.num_units, num_samples=plan.totals.num_samples
        )
        lines = list(plan_lines(plan.totals, plan.num_units))
        reasons = [reason for _, reason in plan.skipped()]
    print_table("Settings", settings_lines(settings))
    print_table("Plan", [*lines, ("skipped", str(len(reasons))), *_memory_lines(resolved)])
    if (directory / records.SETTINGS_FILE).exists():
        committed = start_dataset(str(directory), settings)
        print(f"{directory} is continued: {len(committed)} of {settings.num_units} units are there")
    return 0


def _memory_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """What one engine takes, as far as it can be known without starting it."""
    from vllm.entrypoints.extract.writer_thread import MAX_WAITING_BYTES

    config = resolved.vllm_config
    weights = sum(
        path.stat().st_size
        for path in Path(config.model_config.model).expanduser().glob("*.safetensors")
    )
    pool = config.cache_config.kv_cache_memory_bytes
    utilization = config.cache_config.gpu_memory_utilization
    budget = pool or config.device_config.platform.kv_cache_budget_bytes(utilization)
    return [
        ("weights", format_bytes(weights) if weights else "not on this machine yet"),
        ("pool", f"up to {format_bytes(int(budget))}"),
        ("rows waiting for the disk", f"up to {format_bytes(MAX_WAITING_BYTES)}"),
    ]


def _open_plan(
    folder: Path, sources: list[Source], resolved: Resolved, settings: DatasetSettings
) -> Plan:
    rules = resolved.plan_rules(settings)
    if has_plan(folder, rules.key):
        return Plan(folder)
    columns = resolved.prompt_rules.columns
    return make_plan(folder, sources, columns, resolved.prompt_maker(), rules)


@contextmanager
def _sources(options: ExtractOptions, directory: Path) -> Iterator[list[Source]]:
    """The files of the input. Standard input becomes one while it is needed."""
    with ExitStack() as stack:
        sources: list[Source] = []
        for name in options.input:
            if name != STDIN:
                sources += find_sources([name], options.input_format)
                continue
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(dir=directory, prefix=BUILDING_PREFIX)
            )
            spool = Path(folder) / "stdin"
            with spool.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, _COPY_BYTES)
            sources.append(
                Source(spool, "jsonl" if options.input_format == "auto" else options.input_format)
            )
        yield sources


__all__ = ["load_llm", "run_job"]
