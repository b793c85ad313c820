"""A pool of workers with one engine each: started, replaced when they die, and ended."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol, cast

from vllm.entrypoints.extract.unit_queue import (
    Progress,
    RemoteQueue,
    UnitQueue,
    end_with_parent,
    serve_queue,
)
from vllm.entrypoints.extract.worker import WorkerJob, run_worker, why_ended
from vllm.logger import init_logger
from vllm.platforms import get_platform
from vllm.utils.child_process import leave_signals, signals_that_wait
from vllm.utils.stop_watch import StopWatch

logger = init_logger(__name__)

_TICK_SECONDS = 0.2
_END_SECONDS = 60.0
"""Time for workers to free their devices when everything is on the disk."""


class RunningWorker(Protocol):
    """The methods of :class:`multiprocessing.Process` that a pool uses."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...


def run_pool(
    start: Callable[[int, int], RunningWorker],
    num_workers: int,
    queue: UnitQueue,
    on_tick: Callable[[Progress], None],
) -> None:
    """Run workers until every unit is done; ``on_tick`` is called a few times a second.

    start: starts a worker with a number and a slot (its share of the machine).
    A worker that dies is replaced, and its units return to the queue. Raises FailureError if a
    worker reported a failure, or too many have died.
    """
    numbers = itertools.count()
    workers: dict[int, tuple[int, RunningWorker]] = {}  # by slot
    try:
        while not queue.is_finished():
            for slot in set(range(num_workers)).difference(workers):
                number = next(numbers)
                workers[slot] = number, start(number, slot)
            time.sleep(_TICK_SECONDS)
            for slot, (number, worker) in list(workers.items()):
                if not worker.is_alive() and not queue.is_finished():
                    del workers[slot]
                    worker.terminate()  # gives back what it has beside its process
                    queue.release(number)
                    logger.warning("worker %d died; another one will do its units", number)
            on_tick(queue.progress())
        for _, worker in workers.values():
            worker.join(_END_SECONDS)
    finally:
        for _, worker in workers.values():
            worker.terminate()
        for _, worker in workers.values():
            worker.join()


def run_pool_worker(number: int, job: WorkerJob, queue: UnitQueue) -> None:
    """Run a worker to its end, and report a failure to the queue."""
    try:
        run_worker(number, job, queue)
    except (OSError, RuntimeError, ValueError) as error:
        queue.fail(why_ended(error))


def run_processes(
    job: WorkerJob, num_workers: int, units: list[int], on_tick: Callable[[Progress], None]
) -> None:
    """Do ``units`` in processes of this machine; otherwise the same as :func:`run_pool`."""
    platform = get_platform(job.engine_args.device)
    args = job.engine_args
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size)
    num_parts = num_workers * math.prod([*sizes, args.prefill_context_parallel_size])
    context = multiprocessing.get_context("spawn")
    queue = UnitQueue(units)
    watches: dict[int, StopWatch] = {}  # by slot

    def start(number: int, slot: int) -> SpawnProcess:
        own_end, worker_end = context.Pipe()
        process = context.Process(target=_main, args=(number, job, worker_end))
        with _environment(platform.share_of_machine(slot, num_parts)), signals_that_wait():
            process.start()
        worker_end.close()
        serve_queue(queue, own_end)
        assert process.pid is not None
        watches[slot] = StopWatch(f"worker {number}", process.pid)
        return process

    def watch(progress: Progress) -> None:
        for one in watches.values():
            one.check()
        on_tick(progress)

    run_pool(start, num_workers, queue, watch)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for processes that start inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _main(number: int, job: WorkerJob, connection: Connection) -> None:
    """Run a worker in its own process."""
    leave_signals(signal.SIGINT)  # the parent ends its workers
    end_with_parent()
    run_pool_worker(number, job, cast(UnitQueue, RemoteQueue(connection)))
