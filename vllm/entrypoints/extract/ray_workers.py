"""Engines on a Ray cluster: an actor for each, and one for the queue of units."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, cast

from vllm.entrypoints.extract.processes import run_pool, run_pool_worker
from vllm.entrypoints.extract.unit_queue import Progress, UnitQueue
from vllm.entrypoints.extract.worker import WorkerJob
from vllm.logger import init_logger
from vllm.platforms import get_platform
from vllm.utils import ray_cluster

logger = init_logger(__name__)

_OPTION = "distributed='ray'"
_MOST_LETTERS = 600


def run_ray(
    job: WorkerJob,
    num_workers: int,
    units: list[int],
    on_tick: Callable[[Progress], None],
    address: str | None = None,
) -> None:
    """Do what :func:`run_processes` does, on the Ray cluster at this address, else at that of
    ``RAY_ADDRESS``, else on this machine.

    Raises ValueError if Ray cannot be used, or no worker finds room in the cluster.
    """
    ray = ray_cluster.connect(_OPTION, address, shows_logs=False)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    queue = ray.remote(UnitQueue).options(num_cpus=0, scheduling_strategy=here).remote(units)
    places = _Places(ray, job, num_workers)

    def start(number: int, slot: int) -> _ActorHandle:
        actor, group = places.start_actor()
        result = actor.run.remote(number, job, queue, places.environment)
        places.newest[slot] = _ActorHandle(ray, number, actor, result, group)
        return places.newest[slot]

    def tick(progress: Progress) -> None:
        places.check()
        on_tick(progress)

    try:
        run_pool(start, num_workers, cast(UnitQueue, _QueueProxy(queue)), tick)
    finally:
        ray.kill(queue)


class _Places:
    """The resources of each worker: a device, or an equal share of the cores, which its ranks
    divide."""

    def __init__(self, ray: Any, job: WorkerJob, num_workers: int) -> None:
        self._ray = ray
        args = job.engine_args
        self._seconds = args.distributed_timeout_seconds
        self._has_device = get_platform(args.device).works_beside_host
        self._num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        self._ranks_are_actors = self._num_ranks > 1 and args.distributed_executor_backend == "ray"
        cpus = list(ray_cluster.cpus_of_nodes(ray).values())
        if self._ranks_are_actors:
            each = ray_cluster.share_of_cpus(cpus, num_workers * self._num_ranks)
        else:
            each = max(1, ray_cluster.share_of_cpus(cpus, num_workers) // self._num_ranks)
        self._cpus_of_rank = ray_cluster.stated_cpus() or each
        self.newest: dict[int, _ActorHandle] = {}
        """The last worker of each slot."""
        self._deadline = time.monotonic() + self._seconds

    @property
    def environment(self) -> dict[str, str]:
        return {} if self._has_device else {"VLLM_CPU_THREADS": str(self._cpus_of_rank)}

    def start_actor(self) -> tuple[Any, Any]:
        """Start an actor as soon as there is room; returns it and its placement group, if it has
        one."""
        ray, actors = self._ray, self._ray.remote(_Actor)
        if self._has_device:
            return actors.options(num_cpus=1, num_gpus=1).remote(), None
        if not self._ranks_are_actors:
            return actors.options(num_cpus=self._cpus_of_rank * self._num_ranks).remote(), None
        bundles = [{"CPU": self._cpus_of_rank}] * self._num_ranks
        group = ray.util.placement_group(bundles, strategy="PACK")
        place = ray_cluster.in_bundle(ray, group, 0)
        options = {"num_cpus": self._cpus_of_rank, "scheduling_strategy": place}
        return actors.options(**options).remote(), group

    def check(self) -> None:
        """Raise ValueError if no worker has had room in the cluster for long."""
        if any(one.has_begun() for one in self.newest.values()):
            self._deadline = time.monotonic() + self._seconds
        elif time.monotonic() > self._deadline:
            cpus = f"{self._num_ranks} times {self._cpus_of_rank} CPUs (VLLM_CPU_THREADS)"
            what = f"a worker with {'a device' if self._has_device else cpus}"
            raise ValueError(f"{_OPTION}: {ray_cluster.no_room(self._ray, what, self._seconds)}")


class _Actor:
    def run(self, number: int, job: WorkerJob, queue: Any, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        run_pool_worker(number, job, cast(UnitQueue, _QueueProxy(queue)))


class _ActorHandle:
    """A running actor with the methods that :func:`run_pool` expects of workers."""

    def __init__(self, ray: Any, number: int, actor: Any, result: Any, group: Any) -> None:
        self._ray, self._number = ray, number
        self._actor, self._result, self._group = actor, result, group
        self._begun = actor.__ray_ready__.remote()

    def has_begun(self) -> bool:
        """Return whether the actor has had room, and has not ended."""
        return self._is_ready(self._begun) and self.is_alive()

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def is_alive(self) -> bool:
        return not self._is_ready(self._result)

    def join(self, timeout: float | None = None) -> None:
        self._ray.wait([self._result], timeout=timeout)

    def terminate(self) -> None:
        self._log_reason()
        self._ray.kill(self._actor)
        if self._group is not None:
            ray_cluster.remove_group(self._ray, self._group)

    def _log_reason(self) -> None:
        if self.is_alive():
            return
        try:
            self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:_MOST_LETTERS]
            logger.warning("worker %d: %s", self._number, reason)


class _QueueProxy:
    """Forwards every method to the queue in its actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ray = ray_cluster.import_ray(_OPTION)

        def call(*arguments: object) -> Any:
            try:
                return ray.get(getattr(self._actor, name).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # the message without a traceback in it

        return call
