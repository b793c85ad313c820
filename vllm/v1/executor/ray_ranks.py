"""Ranks that are actors of a Ray cluster, seen from the engine's process.

Ray finds room for them, starts them, and tells when one has ended. Calls and tensors do not pass
through it: they take the way that they take between nodes (:mod:`vllm.v1.executor.nodes`).
"""

from __future__ import annotations

import copy
import os
import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zmq

from vllm.config.connectors import REGISTERED
from vllm.logger import init_logger, log_format
from vllm.model_classes import ModelRegistry
from vllm.utils.child_process import ending_of, with_last_lines
from vllm.utils.ray_cluster import connect, current_group, find_room, in_bundle, remove_group
from vllm.v1.executor.gloo_wiring import GlooWiring, make_store
from vllm.v1.executor.node_links import SocketPlace, private_address
from vllm.v1.executor.rank_actor import RankActor
from vllm.v1.executor.rank_clients import DistantRank
from vllm.v1.executor.rank_messages import RankSettings

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)

BACKEND = "distributed_executor_backend='ray'"
MOST_LETTERS = 600
"""Length of what is passed on of Ray's reason for the end of an actor."""
WAIT_SECONDS = 1.0
CONCURRENT_CALLS = 3
"""One that waits for the end of the process, and others meanwhile."""


class RayRank(DistantRank):
    """A rank's process in a Ray actor."""

    def __init__(
        self,
        rank: int,
        socket: zmq.Socket[bytes],
        timeout_seconds: float,
        ray: Any,
        actor: Any,
        settings: RankSettings,
    ) -> None:
        super().__init__(rank, socket, timeout_seconds)
        self._ray, self._actor = ray, actor
        self._status = actor.run.remote(pickle.dumps(settings))
        self._ending: str | None = None

    @property
    def ending(self) -> str | None:
        if self._ending is None:
            if not self._ray.is_initialized():  # a call would start a new cluster
                self._ending = f"Ray was shut down, with rank {self.rank}"
            elif self._ray.wait([self._status], timeout=0)[0]:
                self._ending = self._how_it_ended()
        return self._ending

    def _how_it_ended(self) -> str:
        try:
            status, last_lines = self._ray.get(self._status)
            ending = f"{ending_of('rank', self.rank, status)} in its Ray actor"
            return with_last_lines(ending, last_lines)
        except self._ray.exceptions.RayError as error:
            text, _, _ = " ".join(str(error).split()).partition(" Some common causes")
            return f"the Ray actor of rank {self.rank} has ended: {text[:MOST_LETTERS]}"

    def wait_for_end(self) -> None:
        while self.ending is None:
            self._ray.wait([self._status], timeout=WAIT_SECONDS)

    def write_stacks(self) -> None:
        if self._ray.is_initialized():
            self._actor.write_stacks.remote()

    def end(self, grace_seconds: float) -> None:
        if self._ray.is_initialized():
            self._ray.wait([self._status], timeout=grace_seconds)
            self._ray.kill(self._actor)


class RayRanks:
    """Room for the ranks of an engine, the first of which is in this process."""

    def __init__(self, config: VllmConfig) -> None:
        """Wait for room, and note the driver's place in ``config``.

        ValueError: Ray cannot be used, or there is no room.
        """
        parallel, place = config.parallel_config, config.parallel_config.ray_place
        self._config = config
        self._ray = ray = connect(BACKEND, None if place is None else place.address)
        group = current_group(ray) if place is None else place.group
        seconds = parallel.distributed_timeout_seconds
        self._room = find_room(ray, BACKEND, parallel.world_size, group, seconds)
        self._ranks: list[RayRank] = []
        try:
            address = ray.util.get_node_ip_address()
            self._host = private_address(f"{BACKEND}: this node's address {address!r}", address)
            self._store = make_store(self._host, socket.create_server((self._host, 0)))
        except BaseException:
            self.end(0.0)
            raise
        self.wiring = GlooWiring(self._host, self._store.port)
        self._places = {one.rank: one for one in self._placed(parallel)}
        config.parallel_config = self._places[parallel.rank]

    def _placed(self, parallel: ParallelConfig) -> Iterator[ParallelConfig]:
        """Yield the ranks' configs. Those of a stage are on one node if it has room for them."""
        nodes = [node for _, node in self._room.bundles]
        for place, rank in enumerate(parallel.ranks_of_node(0)):
            yield replace(
                parallel,
                rank=rank,
                machine_rank=nodes[:place].count(nodes[place]),
                ranks_on_machine=nodes.count(nodes[place]),
                num_cpus=self._room.num_cpus,
                ray_place=None,
            )

    def make_ranks(self, context: zmq.Context[Any]) -> list[RayRank]:
        """Start the actors of all other ranks."""
        ray, room = self._ray, self._room
        actors = ray.remote(RankActor)
        for (bundle, _), rank in list(zip(room.bundles, self._places, strict=True))[1:]:
            parallel = self._places[rank]
            calls = context.socket(zmq.PAIR)
            place = SocketPlace.bind(calls, self._host)
            actor = actors.options(
                num_cpus=room.num_cpus,
                max_concurrency=CONCURRENT_CALLS,
                scheduling_strategy=in_bundle(ray, room.group, bundle),
            ).remote({**_environment(), "OMP_NUM_THREADS": str(room.num_cpus)})
            config = copy.copy(self._config)
            config.parallel_config = parallel
            models, connectors = ModelRegistry.snapshot(), dict(REGISTERED)
            settings = RankSettings(config, self.wiring, models, connectors, log_format(), place)
            seconds = parallel.distributed_timeout_seconds
            self._ranks.append(RayRank(rank, calls, seconds, ray, actor, settings))
        nodes = len({node for _, node in room.bundles})
        logger.info("ranks are Ray actors, with %d CPUs each on %d nodes", room.num_cpus, nodes)
        return self._ranks

    def end(self, grace_seconds: float) -> None:
        """End the actors, and give the room back."""
        for rank in self._ranks:
            rank.end(grace_seconds)  # at once if it has ended
        if self._room.is_own:
            remove_group(self._ray, self._room.group)


def _environment() -> dict[str, str]:
    """Return the variables that ranks have from the engine's process; keys are not among them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("VLLM_", "HF_")) and not name.endswith("_KEY")
    }
