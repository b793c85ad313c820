"""The connections of an engine's processes over TCP, by torch.distributed's gloo."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store, TCPStore

from vllm.config import ParallelConfig
from vllm.distributed.gloo_communicator import GlooCommunicator, address_towards
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.pipeline_links import PipelineLinks
from vllm.v1.executor.rank_wiring import Place, connect


def make_store(host: str, listener: socket.socket) -> TCPStore:
    """Make the store in which ranks find each other, at the address of a socket that listens."""
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class GlooWiring(NamedTuple):
    """The place at which the ranks of an engine find each other."""

    host: str
    port: int

    @property
    def files(self) -> tuple[int, ...]:
        """Descriptors that processes inherit: none."""
        return ()

    def open(self, parallel: ParallelConfig) -> GlooConnections:
        seconds = timedelta(seconds=parallel.distributed_timeout_seconds)
        store = TCPStore(self.host, self.port, is_master=False, timeout=seconds)
        return GlooConnections(parallel, store, address_towards(self.host, self.port))

    def close(self) -> None:
        """Do nothing: connections begin with groups."""


class GlooConnections:
    """One process's connections, which it makes anew after each failure."""

    def __init__(self, parallel: ParallelConfig, store: Store, address: str) -> None:
        """store: in which this engine's ranks find each other. address: of this machine."""
        self._parallel, self._store, self._address = parallel, store, address

    def join(
        self, generation: int, are_others_alive: Callable[[], bool] = lambda: True
    ) -> tuple[GroupCoordinator, PipelineLinks]:
        """Return the group of the stage's ranks and the links to other stages, both new.

        GroupClosedError: another rank does not come.
        """
        return connect(self._parallel, lambda place: self._make(generation, place))

    def join_all(self, generation: int) -> GlooCommunicator:
        """Return a group of all ranks of the engine."""
        everyone = tuple(range(self._parallel.world_size))
        return self._make(generation, Place("all", everyone))

    def announce(self, generation: int) -> None:
        """Note that this rank comes to a group."""
        self._store.set(f"{generation}/here/{self._parallel.rank}", "1")

    def missing(self, generation: int) -> list[int]:
        """Return the ranks that did not come to a group, as far as it is known."""
        ranks = range(self._parallel.world_size)
        try:
            return [rank for rank in ranks if not self._store.check([f"{generation}/here/{rank}"])]
        except RuntimeError:  # the process with the store has ended
            return []

    def _make(self, generation: int, place: Place) -> GlooCommunicator:
        kind, ranks = place
        name = f"{generation}/{kind}/{'-'.join(map(str, ranks))}"
        seconds = self._parallel.distributed_timeout_seconds
        own = ranks.index(self._parallel.rank)
        return GlooCommunicator(self._store, name, own, len(ranks), seconds, self._address)
