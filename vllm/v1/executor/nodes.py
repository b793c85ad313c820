"""The nodes of an engine, seen from its process: it waits for them and gives them their ranks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import zmq

from vllm.v1.executor.gloo_wiring import GlooWiring, make_store
from vllm.v1.executor.node_links import MeetingPlace, NodeLink, SocketPlace
from vllm.v1.executor.node_meeting import NodeMeeting
from vllm.v1.executor.rank_clients import DistantRank
from vllm.v1.executor.rank_terms import terms_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteRank(DistantRank):
    """A rank's process on another node, which that node's process has started."""

    def __init__(
        self, rank: int, socket: zmq.Socket[bytes], timeout_seconds: float, link: NodeLink
    ) -> None:
        super().__init__(rank, socket, timeout_seconds)
        self._link = link

    @property
    def ending(self) -> str | None:
        return self._link.ending(self.rank)

    @property
    def is_stopped(self) -> bool:
        return self.rank in self._link.stopped

    def wait_for_end(self) -> None:
        self._link.wait_for_end(self.rank)

    def write_stacks(self) -> None:
        self._link.send({"stacks": self.rank})

    def end(self, grace_seconds: float) -> None:
        self._link.end(grace_seconds)


class Nodes:
    """All nodes but this one, and the sockets at which they and their ranks meet."""

    def __init__(self, config: VllmConfig) -> None:
        """Wait until all nodes have come.

        ValueError: the address cannot be used, or a node differs or does not come.
        """
        self._config, self._parallel = config, config.parallel_config
        place = MeetingPlace.of_ranks(self._parallel)
        self._store = make_store(place.host, place.listen(0))
        self.wiring = GlooWiring(place.host, self._store.port)
        self._meeting = NodeMeeting(
            place,
            f"nnodes={self._parallel.nnodes}",
            "node",
            range(1, self._parallel.nnodes),
            terms_of(config),
            self._parallel.distributed_timeout_seconds,
        )
        try:
            self._meeting.wait()
        except BaseException:
            self.end(0.0)
            raise
        self._meeting.stop_listening()

    def make_ranks(self, context: zmq.Context[Any]) -> list[RemoteRank]:
        """Let the nodes start their ranks, and return these."""
        parallel, remote = self._parallel, []
        for node, link in self._meeting.links.items():
            places = {}
            for rank in parallel.ranks_of_node(node):
                socket = context.socket(zmq.PAIR)
                places[rank] = SocketPlace.bind(socket, self._meeting.place.host)
                seconds = parallel.distributed_timeout_seconds
                remote.append(RemoteRank(rank, socket, seconds, link))
            message = {"store_port": self._store.port, "ranks": places}
            link.send(message, pickle.dumps(self._config))
        return remote

    def end(self, grace_seconds: float) -> None:
        """Let the processes of all nodes end."""
        self._meeting.end(grace_seconds)
