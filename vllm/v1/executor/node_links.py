"""Connections between node 0 and the processes of other nodes.

Node 0 is the engine's process or, with engines on other nodes, their front end. Both ends first
show that they know the key of ``VLLM_NODE_KEY``; it is not sent. Messages are JSON, but for the
config that node 0 sends.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

import zmq

from vllm import envs
from vllm.config import ParallelConfig
from vllm.utils.child_process import ending_of, with_last_lines

HANDSHAKE_SECONDS = 10.0
BACKLOG = 128
"""Nodes that may come at the same moment."""
BAD_MESSAGE = (ValueError, KeyError, TypeError)
"""Errors of code that reads a message of another program."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Seconds and attempts after which a machine that does not answer counts as gone."""


def private_address(name: str, host: str) -> str:
    """Return the IPv4 address of ``host``. ValueError, which begins with ``name``: it has none that
    is private."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError as error:
        raise ValueError(f"{name} has no IPv4 address: {error.strerror or error}") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(
            f"{name} stands for all addresses of a machine, public ones included; name one of them "
            "that is private"
        )
    if ipaddress.ip_address(address).is_global:
        raise ValueError(
            f"{name} is the public address {address}: nodes send each other tensors and pickled "
            "objects without encryption; use a private network"
        )
    return address


class MeetingPlace(NamedTuple):
    """The address and port of node 0 at which the other nodes meet it."""

    host: str
    port: int
    address: str
    """The address as it was given."""
    names: tuple[str, str]
    """The options that name address and port."""

    @classmethod
    def of(cls, parallel: ParallelConfig, address_name: str, port_name: str) -> MeetingPlace:
        """Read two options. ValueError: the address is not a private one."""
        address = getattr(parallel, address_name)
        host = private_address(f"{address_name}={address!r}", address)
        return cls(host, getattr(parallel, port_name), address, (address_name, port_name))

    @classmethod
    def of_ranks(cls, parallel: ParallelConfig) -> MeetingPlace:
        """Return where the nodes of one engine meet."""
        return cls.of(parallel, "master_addr", "master_port")

    @classmethod
    def of_engines(cls, parallel: ParallelConfig) -> MeetingPlace:
        """Return where the engines of other nodes meet their front end."""
        return cls.of(parallel, "data_parallel_address", "data_parallel_rpc_port")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def listen(self, port: int | None = None) -> socket.socket:
        """Listen at the address. ValueError: that is not possible."""
        port = self.port if port is None else port
        address_name, port_name = self.names
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                problem = f"{port_name}={port} is in use at {self.host}; choose another"
            else:
                problem = (
                    f"{address_name}={self.address!r}, {port_name}={port}: {error.strerror}; name "
                    "an address of the machine of node 0"
                )
            raise ValueError(problem) from error
        return listener


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
    """Node 0's end of the connection to another node's process, which has children."""

    def __init__(self, connection: Connection, name: str, noun: str) -> None:
        """noun: what the node's children are, "rank" or "engine"."""
        self.name, self._noun = name, noun
        self._connection = connection
        self.stopped: set[int] = set()
        """Children that a signal has stopped for a while."""
        self._endings: dict[int, str] = {}
        self._is_gone = False
        self._changed = threading.Condition()

    def listen(self) -> None:
        """Take in what the node says, from a thread, until it is gone."""
        with suppress(EOFError, *BAD_MESSAGE):
            while True:
                message = receive(self._connection)
                with self._changed:
                    if "stopped" in message:
                        self.stopped = set(message["stopped"])
                        continue
                    child = message["child"]
                    ending = f"{ending_of(self._noun, child, message['status'])} on {self.name}"
                    self._endings[child] = with_last_lines(ending, str(message["last_lines"]))
                    self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()

    def ending(self, child: int) -> str | None:
        """Say how a child of the node ended; None: it runs."""
        gone = f"{self.name} has gone, with {self._noun} {child}" if self._is_gone else None
        return self._endings.get(child, gone)

    def wait_for_end(self, child: int) -> str:
        """Wait until a child has ended; returns how."""
        with self._changed:
            self._changed.wait_for(lambda: self.ending(child) is not None)
        return str(self.ending(child))

    def send(self, message: Any, config: bytes | None = None) -> None:
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())
            if config is not None:
                self._connection.send_bytes(config)

    def end(self, grace_seconds: float) -> None:
        """Let the node's process end, which ends its children."""
        self.send({"end": grace_seconds})
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone, grace_seconds + HANDSHAKE_SECONDS)


class SocketPlace(NamedTuple):
    """A zmq socket of node 0 to which processes of other nodes connect."""

    url: str
    key: str
    """Its public key (CURVE), which only the nodes know. Data are encrypted by it."""

    @classmethod
    def bind(cls, socket: zmq.Socket[Any], host: str) -> SocketPlace:
        """Bind a socket at a free port of an address."""
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.bind(f"tcp://{host}:*")
        url = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(url, bytes)
        return cls(url.decode(), public.decode())

    def connect(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = self.key.encode()
        socket.connect(self.url)
