"""Engines on a Ray cluster: an actor for each, and one for the queue of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from vllm.entrypoints.extract.processes import run_pool, run_pool_worker
from vllm.entrypoints.extract.unit_queue import Progress, UnitQueue
from vllm.entrypoints.extract.worker import WorkerJob
from vllm.platforms import get_platform


def run_ray(
    job: WorkerJob, num_workers: int, units: list[int], on_tick: Callable[[Progress], None]
) -> None:
    """Do what :func:`run_processes` does, on the Ray cluster of ``RAY_ADDRESS`` or on this machine.

    Raises ValueError if Ray is not installed.
    """
    ray = _import_ray()
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    queue = ray.remote(UnitQueue).options(num_cpus=0, scheduling_strategy=here).remote(units)
    actor_class = ray.remote(_Actor).options(**_resources(ray, job, num_workers))

    def start(number: int, slot: int) -> _ActorHandle:
        actor = actor_class.remote()
        return _ActorHandle(ray, actor, actor.run.remote(number, job, queue))

    try:
        run_pool(start, num_workers, cast(UnitQueue, _QueueProxy(queue)), on_tick)
    finally:
        ray.kill(queue)


def _resources(ray: Any, job: WorkerJob, num_workers: int) -> dict[str, int]:
    """Return the resources of each actor: a device, or an equal share of the cores."""
    if get_platform(job.engine_args.device).works_beside_host:
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
        raise ValueError("distributed='ray' needs Ray; pip install ray") from error
    return ray


class _Actor:
    def run(self, number: int, job: WorkerJob, queue: Any) -> None:
        run_pool_worker(number, job, cast(UnitQueue, _QueueProxy(queue)))


class _ActorHandle(NamedTuple):
    """A running actor with the methods that :func:`run_pool` expects of workers."""

    ray: Any
    actor: Any
    result: Any

    def is_alive(self) -> bool:
        return not self.ray.wait([self.result], timeout=0)[0]

    def join(self, timeout: float | None = None) -> None:
        self.ray.wait([self.result], timeout=timeout)

    def terminate(self) -> None:
        self.ray.kill(self.actor)


class _QueueProxy:
    """Forwards every method to the queue in its actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ray = _import_ray()

        def call(*arguments: object) -> Any:
            try:
                return ray.get(getattr(self._actor, name).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # the message without a traceback in it

        return call
