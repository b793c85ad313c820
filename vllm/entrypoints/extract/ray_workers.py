"""Engines on a Ray cluster: an actor for each, and one that hands out the units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.extract.errors import describe_error
from vllm.entrypoints.extract.units import Progress, UnitQueue
from vllm.entrypoints.extract.worker import WorkerJob, run_worker
from vllm.logger import init_logger
from vllm.platforms import get_platform

logger = init_logger(__name__)

_TICK_SECONDS = 0.2
_END_SECONDS = 60.0


def run_ray(
    job: WorkerJob, num_workers: int, units: list[int], on_tick: Callable[[Progress], None]
) -> None:
    """As :func:`run_processes`, on the Ray cluster of ``RAY_ADDRESS``, or else on this machine.

    ValueError: Ray is not installed.
    """
    ray = _import_ray()
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    queue = ray.remote(UnitQueue).options(num_cpus=0, scheduling_strategy=here).remote(units)
    actor_class = ray.remote(_RayWorker).options(**_resources(ray, job, num_workers))
    actors: dict[int, Any] = {}
    results: dict[Any, int] = {}
    num_started = 0
    try:
        while not ray.get(queue.is_finished.remote()):
            while len(actors) < num_workers:
                actors[num_started] = actor = actor_class.remote()
                results[actor.run.remote(num_started, job, queue)] = num_started
                num_started += 1
            ended, _ = ray.wait(list(results), timeout=_TICK_SECONDS)
            for result in ended:
                number = results.pop(result)
                ray.kill(actors.pop(number))
                _take_result(ray, result, number, queue)
            on_tick(ray.get(queue.progress.remote()))
        ray.wait(list(results), num_returns=len(results), timeout=_END_SECONDS)
    finally:
        for actor in (*actors.values(), queue):
            ray.kill(actor)


def _take_result(ray: Any, result: Any, number: int, queue: Any) -> None:
    """RuntimeError: the worker says why it failed, or too many have died."""
    try:
        message = ray.get(result)
    except ray.exceptions.RayActorError as error:
        logger.warning("worker %d is lost (%s); another one does its units", number, error)
        ray.get(queue.release.remote(number))
        return
    if message:
        raise RuntimeError(message)


def _resources(ray: Any, job: WorkerJob, num_workers: int) -> dict[str, int]:
    """What Ray gives each actor: a device, or an equal part of the cores."""
    if get_platform(job.engine_args.device).device_type != "cpu":
        return {"num_cpus": 1, "num_gpus": 1}
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fitting = (
        each
        for each in range(max(cores), 1, -1)
        if sum(count // each for count in cores) >= num_workers
    )
    return {"num_cpus": next(fitting, 1)}


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ValueError("distributed='ray' needs Ray; pip install 'vllm[ray]'") from error
    return ray


class _RayWorker:
    """An actor."""

    def run(self, number: int, job: WorkerJob, queue: Any) -> str:
        """Returns when all is done, or the reason why this worker failed."""
        try:
            run_worker(number, job, _RaySource(queue))
        except (OSError, RuntimeError, ValueError) as error:
            return describe_error(error)
        return ""


class _RaySource:
    """The actor that hands out the units, as a worker asks it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._get = _import_ray().get

    def claim(self, worker: int) -> int | None:
        unit: int | None = self._get(self._queue.claim.remote(worker))
        return unit

    def is_finished(self) -> bool:
        return bool(self._get(self._queue.is_finished.remote()))

    def report(self, worker: int, progress: Progress) -> None:
        self._get(self._queue.report.remote(worker, progress))

    def commit(self, worker: int, unit: int) -> None:
        self._get(self._queue.commit.remote(worker, unit))


__all__ = ["run_ray"]
