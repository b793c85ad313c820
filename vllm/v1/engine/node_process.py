"""The process of a node that is not the first: it starts the node's part, and ends with node 0.

vllm serve MODEL --nnodes 2 --node-rank 1 --master-addr ADDRESS --headless ...
vllm serve MODEL --data-parallel-size 4 --data-parallel-start-rank 2 --headless ...
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm.config.connectors import REGISTERED
from vllm.logger import init_logger, log_format
from vllm.model_classes import ModelRegistry
from vllm.utils.child_process import ChildProcess, private_folder
from vllm.utils.stop_watch import StopWatch
from vllm.v1.engine.core_process import CoreSettings
from vllm.v1.executor.gloo_wiring import GlooWiring
from vllm.v1.executor.node_links import (
    MeetingPlace,
    SocketPlace,
    authenticate,
    connection_over,
    receive,
)
from vllm.v1.executor.rank_messages import RankSettings
from vllm.v1.executor.rank_terms import terms_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

RETRY_SECONDS = 0.2
STOP_POLL_SECONDS = 5.0


def run_node(config: VllmConfig) -> int:
    """Serve node 0 until it ends; returns the exit status.

    ValueError: it is not found, or does not take this node.
    """
    if config.parallel_config.data_parallel_size > 1 and config.parallel_config.nnodes == 1:
        return NodeOfEngines(config).run()
    return NodeOfRanks(config).run()


class Node(ABC):
    """This machine's children, and the connection to node 0."""

    noun: str
    """Kind of the children, as a word."""
    module: str
    """The module that they run."""
    leader: str
    """The part of the whole that node 0 has, as words."""

    def __init__(self, config: VllmConfig, place: MeetingPlace, members: Collection[int]) -> None:
        """members: what node 0 waits for."""
        self._config, self._parallel = config, config.parallel_config
        self._place, self._members = place, members
        self._children: dict[int, ChildProcess] = {}

    @abstractmethod
    def _numbers(self) -> Collection[int]:
        """Return the numbers of the children."""

    @abstractmethod
    def _start(self, message: Any, config: VllmConfig) -> None:
        """Let children begin. config: that of node 0, with this node's checkpoint."""

    def run(self) -> int:
        name = f"{self.leader} at {self._place}"
        try:
            for number in self._numbers():  # they load while this process waits
                folder = private_folder(f"vllm-{self.noun}-")
                self._children[number] = ChildProcess(self.module, folder)
            connection = _connect(self._place, self._parallel.distributed_timeout_seconds)
            authenticate(connection, is_engine=False)
            self._greet(connection)
            return self._serve(connection)
        except AuthenticationError as error:
            raise ValueError(f"{name} does not have the same VLLM_NODE_KEY: {error}") from error
        except (EOFError, OSError):
            logger.error("%s has ended, or refused this node; its log says why", name)
            return 1
        finally:
            for child in self._children.values():
                child.end()

    def _greet(self, connection: Connection) -> None:
        hello = {
            "members": list(self._members),
            "noun": self.noun,
            "host": socket.gethostname(),
            "terms": terms_of(self._config),
        }
        connection.send_bytes(json.dumps(hello).encode())

    def _serve(self, connection: Connection) -> int:
        """Report ends of children, and do what node 0 asks for; returns the exit status.

        EOFError: it has gone. ValueError: it refused this node.
        """
        is_sending = threading.Lock()

        def send(message: Any) -> None:
            with is_sending:
                connection.send_bytes(json.dumps(message).encode())

        def report(number: int, child: ChildProcess) -> None:
            status = child.wait()
            with suppress(OSError):
                send({"child": number, "status": status, "last_lines": child.last_lines})

        for number, child in self._children.items():
            threading.Thread(target=report, args=(number, child), daemon=True).start()
        threading.Thread(target=self._watch_for_stops, args=(send,), daemon=True).start()
        while "end" not in (message := receive(connection)):
            if "error" in message:
                raise ValueError(message["error"])
            if "stacks" in message:
                with suppress(ProcessLookupError):
                    os.kill(self._children[message["stacks"]].pid, signal.SIGUSR1)
            else:
                config: VllmConfig = pickle.loads(connection.recv_bytes())
                self._start(message, self._adapted(config))
        for child in self._children.values():
            child.end(message["end"])
        return 0 if message["end"] > 0 else 1  # no time to end: node 0 has failed

    def _watch_for_stops(self, send: Callable[[Any], None]) -> None:
        """Tell node 0 which children a signal has stopped, until they or the connection end."""
        watches = {n: StopWatch(f"{self.noun} {n}", c.pid) for n, c in self._children.items()}
        before: list[int] = []
        with suppress(OSError):
            while any(child.is_alive for child in self._children.values()):
                stopped = [number for number, watch in watches.items() if watch.check()]
                if stopped != before:
                    send({"stopped": stopped})
                before = stopped
                time.sleep(STOP_POLL_SECONDS)

    def _adapted(self, leaders: VllmConfig) -> VllmConfig:
        """Return the config of node 0 with this node's checkpoint."""
        config, model = copy.copy(leaders), copy.copy(leaders.model_config)
        own = self._config.model_config
        model.model, model.tokenizer = own.model, own.tokenizer
        config.model_config = model
        return config


class NodeOfRanks(Node):
    """Ranks of the engine of node 0."""

    noun, module, leader = "rank", "vllm.v1.executor.rank_process", "the engine"

    def __init__(self, config: VllmConfig) -> None:
        parallel = config.parallel_config
        if not 1 <= parallel.node_rank < parallel.nnodes:
            raise ValueError(
                f"headless with node_rank={parallel.node_rank} and nnodes={parallel.nnodes}: node "
                "0 runs the engine, and others of several nodes are headless"
            )
        super().__init__(config, MeetingPlace.of_ranks(parallel), [parallel.node_rank])

    def _numbers(self) -> Collection[int]:
        return self._parallel.ranks_of_node(self._parallel.node_rank)

    def _start(self, message: Any, config: VllmConfig) -> None:
        parallel = replace(config.parallel_config, node_rank=self._parallel.node_rank)
        for rank, child in self._children.items():
            own = copy.copy(config)
            own.parallel_config = replace(parallel, rank=rank)
            wiring = GlooWiring(self._place.host, message["store_port"])
            calls = SocketPlace(*message["ranks"][str(rank)])
            models, connectors = ModelRegistry.snapshot(), dict(REGISTERED)
            with suppress(BrokenPipeError):  # its end is reported
                child.send(RankSettings(own, wiring, models, connectors, log_format(), calls))
        logger.info("ranks %s are here", ", ".join(message["ranks"]))


class NodeOfEngines(Node):
    """Engines of the front end of node 0."""

    noun, module, leader = "engine", "vllm.v1.engine.core_process", "the front end"

    def __init__(self, config: VllmConfig) -> None:
        parallel = config.parallel_config
        for name in ("data_parallel_hybrid_lb", "data_parallel_external_lb"):
            if getattr(parallel, name):
                raise ValueError(f"headless with {name}: each of its servers has a front end")
        if parallel.is_offline_engine:
            raise ValueError("headless with VLLM_DP_SIZE, which is for programs; unset it")
        if not parallel.engines_here:
            raise ValueError("headless with data_parallel_size_local=0: there is nothing to run")
        place = MeetingPlace.of_engines(parallel)
        super().__init__(config, place, parallel.engines_here)

    def _numbers(self) -> Collection[int]:
        return self._members

    def _start(self, message: Any, config: VllmConfig) -> None:
        number = message["engine"]
        config.parallel_config = replace(
            config.parallel_config,
            data_parallel_rank=number,
            data_parallel_start_rank=self._parallel.data_parallel_start_rank,
            data_parallel_size_local=self._parallel.data_parallel_size_local,
        )
        settings = CoreSettings(
            vllm_config=config,
            models=ModelRegistry.snapshot(),
            connectors=dict(REGISTERED),
            commands=SocketPlace(*message["commands"]),
            reports=SocketPlace(*message["reports"]),
            log_format=log_format(),
            mark=message["mark"],
        )
        with suppress(BrokenPipeError):  # its end is reported
            self._children[number].send(settings)
        logger.info("engine %d is here", number)


def _connect(place: MeetingPlace, timeout_seconds: float) -> Connection:
    """Connect to node 0, which may not have begun. ValueError: it does not come."""
    deadline = time.monotonic() + timeout_seconds
    logger.info("waiting for the engine at %s", place)
    while True:
        try:
            address = (place.host, place.port)
            return connection_over(socket.create_connection(address, RETRY_SECONDS * 10))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"no engine has come to {', '.join(place.names)} ({place}) for "
                    f"{timeout_seconds:g} s (distributed_timeout_seconds): {error.strerror}"
                ) from error
        time.sleep(RETRY_SECONDS)
