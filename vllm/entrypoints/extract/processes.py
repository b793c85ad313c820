"""Several engines on one machine: a process for each, fed with units through pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from vllm.entrypoints.extract.errors import describe_error
from vllm.entrypoints.extract.units import Progress, UnitQueue
from vllm.entrypoints.extract.worker import WorkerJob, run_worker
from vllm.logger import init_logger

logger = init_logger(__name__)

_TICK_SECONDS = 0.2
_FAILED = "failed"


class _Worker(NamedTuple):
    process: SpawnProcess
    pipe: Connection
    slot: int
    """Which share of the machine it has."""


def run_processes(
    job: WorkerJob, num_workers: int, queue: UnitQueue, on_tick: Callable[[Progress], None]
) -> None:
    """Run workers until every unit is done; ``on_tick`` is called a few times a second.

    A worker that dies is replaced, and its units go back. RuntimeError: a worker has failed by
    itself, or too many have died.
    """
    answers: dict[str, Callable[..., Any]] = {
        "claim": queue.claim,
        "is_finished": queue.is_finished,
        "report": queue.report,
        "commit": queue.commit,
    }
    workers: dict[int, _Worker] = {}
    num_started = 0
    try:
        while not queue.is_finished():
            for slot in set(range(num_workers)).difference(one.slot for one in workers.values()):
                workers[num_started] = _start(num_started, job, slot, num_workers)
                num_started += 1
            ready = wait([worker.pipe for worker in workers.values()], _TICK_SECONDS)
            for number, worker in list(workers.items()):
                if worker.pipe in ready and not _answer(worker.pipe, answers):
                    del workers[number]
                    _bury(number, worker, queue)
            on_tick(queue.progress())
        _let_end(workers, answers)
    finally:
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.process.join()


def _answer(pipe: Connection, answers: dict[str, Callable[..., Any]]) -> bool:
    """Serve one question; False: the worker has ended. RuntimeError: it says why it failed."""
    try:
        name, arguments = pipe.recv()
        if name == _FAILED:
            raise RuntimeError(*arguments)
        pipe.send(answers[name](*arguments))
    except (EOFError, ConnectionError):
        return False
    return True


def _bury(number: int, worker: _Worker, queue: UnitQueue) -> None:
    worker.process.join()
    if queue.is_finished():
        return
    logger.warning(
        "worker %d ended with status %s; another one does its units",
        number,
        worker.process.exitcode,
    )
    queue.release(number)


def _let_end(workers: dict[int, _Worker], answers: dict[str, Callable[..., Any]]) -> None:
    """Everything is on the disk; workers that still ask learn it, and free their devices."""
    pipes = [worker.pipe for worker in workers.values()]
    while pipes:
        for pipe in wait(pipes):
            if isinstance(pipe, Connection) and not _answer(pipe, answers):
                pipes.remove(pipe)


def _start(number: int, job: WorkerJob, slot: int, num_workers: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(number, job, theirs), name=f"extract-{number}")
    with _environment(share_of_machine(job.engine_args.device, slot, num_workers)):
        process.start()
    theirs.close()
    return _Worker(process, ours, slot)


def share_of_machine(device: str, slot: int, num_workers: int) -> dict[str, str]:
    """Environment variables that give a worker its device, or its part of the CPU's threads.

    ValueError: there are fewer devices than workers.
    """
    import torch

    from vllm.platforms import current_platform

    if device == "cpu" or current_platform.device_type == "cpu":
        threads = current_platform.set_num_threads()
        return {"VLLM_CPU_THREADS": str(max(1, threads // num_workers))}
    count = torch.cuda.device_count()
    if num_workers > count:
        raise ValueError(f"data_parallel_size={num_workers}: there are {count} devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[slot] if visible[0] else str(slot)}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process that is started inside finds in its environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(number: int, job: WorkerJob, pipe: Connection) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    source = _PipeSource(pipe)
    try:
        run_worker(number, job, source)
    except (OSError, RuntimeError, ValueError) as error:
        with contextlib.suppress(OSError):
            source.tell(_FAILED, describe_error(error))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child has a parent"
    parent.join()
    os._exit(1)


class _PipeSource:
    """A worker's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))

    def _ask(self, name: str, *arguments: object) -> Any:
        with self._lock:
            self.tell(name, *arguments)
            return self._pipe.recv()

    def claim(self, worker: int) -> int | None:
        unit: int | None = self._ask("claim", worker)
        return unit

    def is_finished(self) -> bool:
        return bool(self._ask("is_finished"))

    def report(self, worker: int, progress: Progress) -> None:
        self._ask("report", worker, progress)

    def commit(self, worker: int, unit: int) -> None:
        self._ask("commit", worker, unit)


__all__ = ["run_processes", "share_of_machine"]
