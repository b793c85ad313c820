"""The process of a node without the engine: it starts the node's ranks, and ends with the engine.

vllm serve MODEL --nnodes 2 --node-rank 1 --master-addr ADDRESS --headless ...
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
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm.config.connectors import REGISTERED
from vllm.logger import init_logger, log_format
from vllm.model_classes import ModelRegistry
from vllm.utils.child_process import ChildProcess, private_folder
from vllm.v1.executor.gloo_wiring import GlooWiring
from vllm.v1.executor.node_links import (
    authenticate,
    connection_over,
    master_place,
    receive,
)
from vllm.v1.executor.rank_messages import CallsPlace, RankSettings
from vllm.v1.executor.rank_terms import terms_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

RETRY_SECONDS = 0.2
RANK_MODULE = "vllm.v1.executor.rank_process"


def run_node(config: VllmConfig) -> int:
    """Serve an engine on node 0 until it ends; returns the exit status.

    ValueError: it is not found, or does not take this node.
    """
    parallel = config.parallel_config
    if not 1 <= parallel.node_rank < parallel.nnodes:
        raise ValueError(
            f"headless with node_rank={parallel.node_rank} and nnodes={parallel.nnodes}: node 0 "
            "runs the engine, and others of several nodes are headless"
        )
    place = master_place(parallel)
    name = f"the engine at {place[0]}:{place[1]}"
    children: dict[int, ChildProcess] = {}
    try:
        for rank in parallel.ranks_of_node(parallel.node_rank):  # they load while this one waits
            children[rank] = ChildProcess(RANK_MODULE, private_folder("vllm-rank-"))
        connection = _connect(place, parallel.distributed_timeout_seconds)
        authenticate(connection, is_engine=False)
        hello = {"node": parallel.node_rank, "host": socket.gethostname()}
        connection.send_bytes(json.dumps({**hello, "terms": terms_of(config)}).encode())
        reply = receive(connection)
        if "error" in reply:
            raise ValueError(reply["error"])
        engines: VllmConfig = pickle.loads(connection.recv_bytes())
        _start_ranks(children, _adapted(engines, config), place[0], reply)
        logger.info("ranks %s of %s are here", ", ".join(reply["ranks"]), name)
        return _serve(children, connection)
    except AuthenticationError as error:
        raise ValueError(f"{name} does not have the same VLLM_NODE_KEY: {error}") from error
    except (EOFError, OSError):
        logger.error("%s has ended, or refused this node; its log says why", name)
        return 1
    finally:
        for child in children.values():
            child.end()


def _connect(place: tuple[str, int], timeout_seconds: float) -> Connection:
    """Connect to the engine, which may not have begun. ValueError: it does not come."""
    deadline = time.monotonic() + timeout_seconds
    logger.info("waiting for the engine at %s:%d", *place)
    while True:
        try:
            return connection_over(socket.create_connection(place, RETRY_SECONDS * 10))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"no engine has come to master_addr, master_port ({place[0]}:{place[1]}) for "
                    f"{timeout_seconds:g} s (distributed_timeout_seconds): {error.strerror}"
                ) from error
        time.sleep(RETRY_SECONDS)


def _adapted(engines: VllmConfig, own: VllmConfig) -> VllmConfig:
    """Return the engine's config with this node's number and checkpoint."""
    config, model = copy.copy(engines), copy.copy(engines.model_config)
    model.model = own.model_config.model
    config.model_config = model
    node_rank = own.parallel_config.node_rank
    config.parallel_config = replace(engines.parallel_config, node_rank=node_rank)
    return config


def _start_ranks(
    children: dict[int, ChildProcess], config: VllmConfig, host: str, reply: Any
) -> None:
    """Tell the ranks what they need to know."""
    for rank, child in children.items():
        own = copy.copy(config)
        own.parallel_config = replace(config.parallel_config, rank=rank)
        wiring = GlooWiring(host, reply["store_port"])
        calls = CallsPlace(**reply["ranks"][str(rank)])
        models, connectors = ModelRegistry.snapshot(), dict(REGISTERED)
        with suppress(BrokenPipeError):  # its end is reported
            child.send(RankSettings(own, wiring, models, connectors, log_format(), calls))


def _serve(children: dict[int, ChildProcess], connection: Connection) -> int:
    """Report ends of ranks, and do what the engine asks for; returns the exit status.

    EOFError: the engine has gone.
    """
    is_sending = threading.Lock()

    def report(rank: int, child: ChildProcess) -> None:
        status = child.wait()
        with is_sending, suppress(OSError):
            connection.send_bytes(json.dumps({"rank": rank, "status": status}).encode())

    for rank, child in children.items():
        threading.Thread(target=report, args=(rank, child), daemon=True).start()
    while "end" not in (message := receive(connection)):
        with suppress(ProcessLookupError):
            os.kill(children[message["stacks"]].pid, signal.SIGUSR1)
    for child in children.values():
        child.end(message["end"])
    return 0 if message["end"] > 0 else 1  # no time to end: the engine is dead
