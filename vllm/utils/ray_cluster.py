"""Ray, as far as this package uses it: the connection, and room for ranks in a cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

CONNECT_SECONDS = 10.0
"""Time for a connection to the cluster's address; Ray itself tries it for many minutes."""


class RayPlace(NamedTuple):
    """The cluster that a process is connected to, for an engine in another process."""

    address: str
    group: Any
    """Placement group of that process; None: it has none."""


class Room(NamedTuple):
    """A placement group, and its bundles for the ranks of an engine."""

    group: Any
    is_own: bool
    """True if it was made for the engine, which removes it."""
    num_cpus: int
    """CPUs of each rank."""
    bundles: list[tuple[int, str]]
    """Number and node of the bundle of each rank. The first is on this node; those of a node follow
    each other."""


def import_ray(option: str) -> Any:
    """Import Ray. ValueError: it is not installed."""
    try:
        import ray
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ValueError(
            f"{option} needs Ray: pip install ray (in the source tree pip install '.[ray]')"
        ) from error
    return ray


def connect(option: str, address: str | None = None, *, shows_logs: bool = True) -> Any:
    """Return Ray, connected: as it is, to this address, to that of RAY_ADDRESS, to a cluster of
    which this machine is a node, or to a new one.

    shows_logs: write the logs of actors into that of this process.
    ValueError: there is no connection.
    """
    ray = import_ray(option)
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or None
        _check_address(option, address)
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=shows_logs)
        except Exception as error:  # Ray raises it bare, too
            raise ValueError(f"{option}: Ray does not start: {error}") from error
        finally:
            if is_main:  # Ray sets its own, by which this process would end
                signal.signal(signal.SIGTERM, handler)
    _check_is_node(ray, option)
    return ray


def _check_address(option: str, address: str | None) -> None:
    """Raise ValueError for an address at which no cluster is."""
    host, colon, port = (address or "").rpartition(":")
    if "://" in host:
        raise ValueError(
            f"{option}: the address {address!r} is that of a Ray client; run this on a node of the "
            "cluster, for example by `ray job submit`, and leave the address out"
        )
    if not colon:
        return  # a word that Ray knows, such as "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option}: no Ray cluster is at the address {address!r} ({error}); name the one that "
            "`ray start --head` printed, in RAY_ADDRESS for example"
        ) from error


def _check_is_node(ray: Any, option: str) -> None:
    if ray.util.client.ray.is_connected():
        raise ValueError(
            f"{option}: Ray is connected as a client (ray://); run this on a node of the cluster"
        )


def place_here() -> RayPlace | None:
    """Return what this process is connected to; None: it does not use Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    _check_is_node(ray, "distributed_executor_backend='ray'")
    return RayPlace(ray.get_runtime_context().gcs_address, current_group(ray))


def current_group(ray: Any) -> Any:
    """Return the placement group of the actor or task that runs here; None: there is none."""
    return ray.util.get_current_placement_group()


def share_of_cpus(cpus: Sequence[int], num_parts: int) -> int:
    """Return the largest number of CPUs that so many parts can each have on nodes with these; 1 if
    they do not fit at all."""
    sizes = range(max(cpus, default=0), 1, -1)
    return next((each for each in sizes if sum(one // each for one in cpus) >= num_parts), 1)


def cpus_of_nodes(ray: Any) -> dict[str, int]:
    """Return the number of CPUs of each node, used or not, by the node's id."""
    nodes = [one for one in ray.nodes() if one["Alive"]]
    return {one["NodeID"]: int(one["Resources"].get("CPU", 0)) for one in nodes}


def stated_cpus() -> int | None:
    """Return the number of threads of a rank that the environment states."""
    return envs.VLLM_CPU_THREADS or envs.OMP_NUM_THREADS


def find_room(ray: Any, option: str, num_ranks: int, group: Any, seconds: float) -> Room:
    """Return room for ranks in a group, or in a new one if that is None, when it is there.

    ValueError: the group does not fit, or there is no room in the cluster for so many seconds.
    """
    if group is not None:
        what = f"a placement group with {group.bundle_count} bundles"
        _wait_for(ray, option, group, what, seconds)
        return _room_in(ray, option, num_ranks, group)
    here, cpus = ray.get_runtime_context().get_node_id(), cpus_of_nodes(ray)
    num_cpus = stated_cpus()
    if num_cpus is None:
        taken = _taken_by_this_process(ray)
        cpus[here] = max(0, cpus[here] - taken)
        num_cpus = min(share_of_cpus(list(cpus.values()), num_ranks), max(1, cpus[here]))
    group = ray.util.placement_group(
        [{"CPU": num_cpus}] * num_ranks,
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": here}, *([{}] * (num_ranks - 1))],
    )
    what = (
        f"{num_ranks} ranks of {num_cpus} CPUs (VLLM_CPU_THREADS), the first of them on this node"
    )
    try:
        _wait_for(ray, option, group, what, seconds)
        return _room_in(ray, option, num_ranks, group)._replace(is_own=True)
    except BaseException:
        remove_group(ray, group)
        raise


def _taken_by_this_process(ray: Any) -> int:
    """Return the CPUs that the task or actor which runs here has for itself."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return 0
    return int(context.get_assigned_resources().get("CPU", 0))


def _wait_for(ray: Any, option: str, group: Any, what: str, seconds: float) -> None:
    deadline, has_told = time.monotonic() + seconds, False
    while not group.wait(1):
        if time.monotonic() > deadline:
            raise ValueError(f"{option}: {no_room(ray, what, seconds)}")
        if not has_told:
            logger.info("waiting for room in the Ray cluster for %s; %s", what, describe(ray))
            has_told = True


def no_room(ray: Any, what: str, seconds: float) -> str:
    """Say that a cluster had no room for something for so many seconds."""
    return (
        f"there was no room in the Ray cluster for {what}, for {seconds:g} s "
        f"(distributed_timeout_seconds); {describe(ray)}"
    )


def describe(ray: Any) -> str:
    """Say which CPUs a cluster has."""
    nodes = [
        f"{one['NodeManagerAddress']} with {one['Resources'].get('CPU', 0):g}"
        for one in ray.nodes()
        if one["Alive"]
    ]
    free = ray.available_resources().get("CPU", 0)
    return f"the nodes' CPUs: {', '.join(nodes)}; {free:g} are free"


def _room_in(ray: Any, option: str, num_ranks: int, group: Any) -> Room:
    cpus = {index: int(one.get("CPU", 0)) for index, one in enumerate(group.bundle_specs)}
    usable = [index for index, count in cpus.items() if count >= 1]
    if len(usable) < num_ranks:
        raise ValueError(
            f"{option}: the placement group has the bundles {group.bundle_specs}, but "
            f"{num_ranks} ranks (tensor_parallel_size times pipeline_parallel_size) need one each "
            'with {"CPU": 1} or more'
        )
    here = ray.get_runtime_context().get_node_id()
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(places[index] for index in usable))
    if here not in nodes:
        raise ValueError(
            f"{option}: no bundle of the placement group with CPUs is on this node, whose process "
            "has the first rank; start the engine in the group"
        )
    usable.sort(key=lambda index: (places[index] != here, nodes.index(places[index]), index))
    bundles = [(index, places[index]) for index in usable[:num_ranks]]
    return Room(group, False, min(cpus[index] for index, _ in bundles), bundles)


def in_bundle(ray: Any, group: Any, bundle: int) -> Any:
    """Return the scheduling strategy of an actor in a bundle."""
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )


def remove_group(ray: Any, group: Any) -> None:
    """Remove a placement group, which ends the actors in it, unless Ray has ended."""
    if ray.is_initialized():
        try:
            ray.util.remove_placement_group(group)
        except Exception as error:  # of several classes, if the cluster has just ended
            logger.warning("a placement group of Ray was not removed: %s", error)
