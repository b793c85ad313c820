"""Connections between the engine's process and the processes of other nodes.

Both ends first show that they know the key of ``VLLM_NODE_KEY``; it is not sent. Messages are JSON,
but for the config that the engine sends at the start.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from vllm import envs
from vllm.config import ParallelConfig
from vllm.v1.executor.rank_clients import ending_of

HANDSHAKE_SECONDS = 10.0
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Seconds and attempts after which a machine that does not answer counts as gone."""


def master_place(parallel: ParallelConfig) -> tuple[str, int]:
    """Return the IPv4 address and the port at which nodes meet. ValueError: it is not private."""
    name = f"master_addr={parallel.master_addr!r}"
    return private_address(name, parallel.master_addr), parallel.master_port


def private_address(name: str, host: str) -> str:
    """Return the IPv4 address of ``host``. ValueError, which begins with ``name``: it has none that
    is private."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError as error:
        raise ValueError(f"{name} has no IPv4 address: {error.strerror or error}") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_global:
        raise ValueError(
            f"{name} is the public address {address}: nodes send each other tensors and pickled "
            "objects without encryption; use a private network"
        )
    return address


def connection_over(link: socket.socket) -> Connection:
    """Make a connection of a socket, which notices that the other machine is gone."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(link.detach())


def authenticate(connection: Connection, *, is_engine: bool) -> None:
    """Compare keys. AuthenticationError: the other end has another, or says nothing."""
    key = envs.VLLM_NODE_KEY.encode()
    steps = (deliver_challenge, answer_challenge)
    for step in steps if is_engine else reversed(steps):
        if step is answer_challenge and not connection.poll(HANDSHAKE_SECONDS):
            raise AuthenticationError("no challenge came")
        step(connection, key)


def receive(connection: Connection) -> Any:
    """Wait for a message. EOFError: the other end has gone."""
    try:
        return json.loads(connection.recv_bytes())
    except OSError as error:
        raise EOFError(str(error)) from error


class NodeLink:
    """The engine's end of the connection to another node's process."""

    def __init__(self, connection: Connection, node: int, host: str) -> None:
        self.node, self.host = node, host
        self._connection = connection
        self._endings: dict[int, str] = {}
        self._is_gone = False
        self._changed = threading.Condition()

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"

    def listen(self) -> None:
        """Take in what the node says, from a thread, until it is gone."""
        with suppress(EOFError):
            while True:
                message = receive(self._connection)
                with self._changed:
                    rank = message["rank"]
                    ending = ending_of(rank, message["status"])
                    self._endings[rank] = f"{ending} on {self.name}"
                    self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()

    def ending(self, rank: int) -> str | None:
        """Say how a rank's process ended; None: it runs."""
        gone = f"{self.name} has gone, with rank {rank}" if self._is_gone else None
        return self._endings.get(rank, gone)

    def wait_for_end(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ending(rank) is not None)

    def send(self, message: Any, config: bytes | None = None) -> None:
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())
            if config is not None:
                self._connection.send_bytes(config)

    def end(self, grace_seconds: float) -> None:
        """Let the node's process end, which ends its ranks."""
        self.send({"end": grace_seconds})
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone, grace_seconds + HANDSHAKE_SECONDS)
