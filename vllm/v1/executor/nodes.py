"""The nodes of an engine, seen from its process: it waits for them and gives them their ranks."""

from __future__ import annotations

import errno
import pickle
import socket
import threading
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

import zmq

from vllm.logger import init_logger
from vllm.v1.executor.gloo_wiring import GlooWiring, make_store
from vllm.v1.executor.node_links import (
    NodeLink,
    authenticate,
    connection_over,
    master_place,
    receive,
)
from vllm.v1.executor.rank_clients import RankClient, open_calls
from vllm.v1.executor.rank_terms import differences, terms_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class RemoteRank(RankClient):
    """A rank's process on another node, which that node's process has started."""

    def __init__(
        self, rank: int, socket: zmq.Socket[bytes], timeout_seconds: float, link: NodeLink
    ) -> None:
        super().__init__(rank, socket, timeout_seconds)
        self._link = link

    @property
    def ending(self) -> str | None:
        return self._link.ending(self.rank)

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
        self._host, port = master_place(self._parallel)
        self._terms = terms_of(config)
        self._links: dict[int, NodeLink] = {}
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._store = make_store(self._host, self._listen(0))
        with self._listen(port) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            try:
                self._wait_for_nodes(port)
            except BaseException:
                self.end(0.0)
                raise
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        self.wiring = GlooWiring(self._host, self._store.port)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                problem = f"master_port={port} is in use at {self._host}; choose another"
            else:
                problem = (
                    f"master_addr={self._parallel.master_addr!r}, master_port={port}: "
                    f"{error.strerror}; name an address of the machine of node 0"
                )
            raise ValueError(problem) from error
        return listener

    def _wait_for_nodes(self, port: int) -> None:
        parallel = self._parallel
        logger.info("waiting for %d nodes at %s:%d", parallel.nnodes - 1, self._host, port)
        seconds = parallel.distributed_timeout_seconds
        with self._changed:
            self._changed.wait_for(
                lambda: self._problem or len(self._links) == parallel.nnodes - 1, seconds
            )
            if self._problem is not None:
                raise ValueError(self._problem)
            missing = set(range(1, parallel.nnodes)) - self._links.keys()
        if missing:
            raise ValueError(
                f"nnodes={parallel.nnodes}: node {min(missing)} has not come to "
                f"{self._host}:{port} for {seconds:g} s (distributed_timeout_seconds)"
            )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, (host, _) = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(accepted, host), daemon=True).start()

    def _greet(self, accepted: socket.socket, address: str) -> None:
        """Take in a node that has come, or tell it why not."""
        connection = connection_over(accepted)
        try:
            authenticate(connection, is_engine=True)
            hello = receive(connection)
        except (AuthenticationError, EOFError, OSError, ValueError) as error:
            logger.warning("a connection from %s is refused: %s", address, error or "it ended")
            connection.close()
            return
        link = NodeLink(connection, hello["node"], hello["host"])
        names = ["node 0", link.name]
        different = differences([self._terms, hello["terms"]], names)
        with self._changed:
            if different:
                self._problem = f"nnodes={self._parallel.nnodes}: nodes differ: {different}"
                link.send({"error": self._problem})
            elif not 1 <= link.node < self._parallel.nnodes or link.node in self._links:
                link.send({"error": f"node_rank={link.node}: this node is there already"})
            else:
                self._links[link.node] = link
                threading.Thread(target=link.listen, daemon=True).start()
            self._changed.notify_all()

    def make_ranks(self, context: zmq.Context[Any]) -> list[RemoteRank]:
        """Let the nodes start their ranks, and return these."""
        parallel, remote = self._parallel, []
        for node, link in self._links.items():
            places = {}
            for rank in parallel.ranks_of_node(node):
                rank_socket, place = open_calls(context, self._host)
                places[rank] = place._asdict()
                seconds = parallel.distributed_timeout_seconds
                remote.append(RemoteRank(rank, rank_socket, seconds, link))
            message = {"store_port": self._store.port, "ranks": places}
            link.send(message, pickle.dumps(self._config))
        return remote

    def end(self, grace_seconds: float) -> None:
        """Let the processes of all nodes end."""
        for link in self._links.values():
            link.end(grace_seconds)
