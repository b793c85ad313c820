"""A communicator over TCP, for processes that share no memory.

It copies what :class:`~vllm.distributed.communicators.SharedMemoryCommunicator` copies, so sums
have the same bits.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from vllm.distributed.communicators import GroupClosedError, Parts
from vllm.utils import pickling

_Gloo: Any = ProcessGroupGloo  # its stubs lack the options
PIECE_BYTES = 2**22
"""Bytes of a rank that are under way at once."""


class RankIsLateError(GroupClosedError):
    """Another rank did not call in time."""


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that ``host`` sees. ValueError: it is unknown."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be reached: {error.strerror or error}") from error


class GlooCommunicator:
    """One rank of a group of processes on any machines.

    The connections end when this process ends or :meth:`close` drops them, which the others notice
    in the call that they are in.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        address: str,
    ) -> None:
        """Connect to the others.

        store: in which the ranks find each other. name: of the group, used once.
        address: of this machine; ``GLOO_SOCKET_IFNAME`` names an interface instead.
        GroupClosedError: another rank does not come.
        """
        self._rank, self._world_size = rank, world_size
        self._timeout_seconds = timeout_seconds
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._threads = 1
        self._group: Any = None
        with self._leaves_on_error():
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            options._devices = [
                _Gloo.create_device(interface=interface.split(",")[0])
                if interface
                else _Gloo.create_device(hostname=address)
            ]
            place = (PrefixStore(name, store), rank, world_size)
            self._group = _Gloo(*place, options)

    def exchange(self, tensor: torch.Tensor) -> Iterator[Parts]:
        start = 0
        for mine in _pieces(tensor):
            parts = [torch.empty_like(mine) for _ in range(self._world_size)]
            outputs = [[_as_bytes(part) for part in parts]]
            with self._leaves_on_error():
                self._open.allgather(outputs, [_as_bytes(mine)], AllgatherOptions()).wait()
            place = slice(start, start := start + len(mine))
            yield Parts(place, parts)

    def send(self, tensor: torch.Tensor) -> None:
        for mine in _pieces(tensor):
            with self._leaves_on_error():
                self._open.send([_as_bytes(mine)], 1 - self._rank, 0).wait()

    def receive_into(self, tensor: torch.Tensor) -> None:
        for mine in _pieces(tensor):
            with self._leaves_on_error():
                self._open.recv([_as_bytes(mine)], 1 - self._rank, 0).wait()

    def gather_objects(self, value: object) -> list[Any]:
        """Return the objects of all ranks, which have to be picklable, in their order."""
        data = torch.frombuffer(bytearray(pickling.dumps(value)), dtype=torch.uint8)
        (lengths,) = self.exchange(torch.tensor([len(data)]))
        return [
            self._broadcast_object(value, data, int(length), rank)
            for rank, length in enumerate(lengths.of_ranks)
        ]

    def _broadcast_object(self, value: object, data: torch.Tensor, length: int, rank: int) -> Any:
        is_own = rank == self._rank
        data = data if is_own else torch.empty(length, dtype=torch.uint8)
        for piece in _pieces(data):
            with self._leaves_on_error():
                self._open.broadcast(piece, rank).wait()
        return value if is_own else pickle.loads(data.numpy().data)

    def close(self) -> None:
        self._group = None  # the connections end with the last reference

    @property
    def _open(self) -> Any:
        if self._group is None:
            raise GroupClosedError("this rank has left the group")
        return self._group

    @contextmanager
    def _leaves_on_error(self) -> Iterator[None]:
        try:
            yield
        except GroupClosedError:
            raise
        except RuntimeError as error:
            self.close()
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise RankIsLateError(
                    f"another rank has not come for {self._timeout_seconds:g} s "
                    "(distributed_timeout_seconds)"
                ) from None
            raise GroupClosedError(f"another rank has left the group ({text[:200]})") from None


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat, step = tensor.view(-1), PIECE_BYTES // tensor.element_size()
    for start in range(0, len(flat), step):
        yield flat[start : start + step]


def _as_bytes(dense: torch.Tensor) -> torch.Tensor:
    return dense.view(torch.uint8)  # gloo does not know all dtypes
