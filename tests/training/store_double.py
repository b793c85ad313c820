"""A client with the API of Mooncake's, whose objects are in another process."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NO_ROOM, NOT_THERE, EXISTS, LEASED = -200, -704, -705, -706


def _serve(connection: Connection, most_bytes: int) -> None:
    objects: dict[str, bytes] = {}
    leased: set[str] = set()
    while True:
        method, key, value = connection.recv()
        if method == "put":
            used = sum(map(len, objects.values()))
            if key in objects:
                connection.send(EXISTS)
            elif used + len(value) > most_bytes:
                connection.send(NO_ROOM)
            else:
                objects[key] = value
                connection.send(0)
        elif method == "get":
            connection.send(objects.get(key))
        elif method == "is_exist":
            leased |= {key} & objects.keys()
            connection.send(int(key in objects))
        elif method == "remove" and key in leased and not value:
            connection.send(LEASED)
        elif method == "end_leases":
            leased.clear()
            connection.send(0)
        elif method == "remove":
            connection.send(NOT_THERE if objects.pop(key, None) is None else 0)
        elif method == "keys":
            connection.send(sorted(objects))
        else:
            return


class StoreDouble:
    """Reads and writes by pointers, and refuses memory that was not registered.

    As Mooncake's, it does not remove an object for a while after a client asked whether it exists.
    """

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, most_bytes), daemon=True)
        self.process.start()
        other.close()
        self._lock = threading.Lock()
        self.registered: dict[int, int] = {}
        self.configs: list[Any] = []

    def _ask(self, method: str, key: str = "", value: bytes = b"") -> Any:
        with self._lock:
            self._connection.send((method, key, value))
            return self._connection.recv()

    def all_keys(self) -> list[str]:
        found: list[str] = self._ask("keys")
        return found

    def register_buffer(self, pointer: int, size: int) -> int:
        self.registered[pointer] = size
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0

    def _check(self, pointer: int, size: int) -> None:
        assert not size or self.registered[pointer] >= size

    def put_from(self, key: str, pointer: int, size: int, config: Any = None) -> int:
        self._check(pointer, size)
        self.configs.append(config)
        status: int = self._ask("put", key, ctypes.string_at(pointer, size) if size else b"")
        return status

    def batch_put_from(
        self, keys: list[str], pointers: list[int], sizes: list[int], config: Any = None
    ) -> list[int]:
        parts = zip(keys, pointers, sizes, strict=True)
        return [self.put_from(key, pointer, size, config) for key, pointer, size in parts]

    def get_into(self, key: str, pointer: int, size: int) -> int:
        self._check(pointer, size)
        value = self._ask("get", key)
        if value is None:
            return NOT_THERE
        ctypes.memmove(pointer, value, min(size, len(value)))
        return len(value)

    def is_exist(self, key: str) -> int:
        status: int = self._ask("is_exist", key)
        return status

    def remove(self, key: str, force: bool = False) -> int:
        status: int = self._ask("remove", key, b"force" if force else b"")
        return status

    def end_leases(self) -> None:
        self._ask("end_leases")

    def close(self) -> None:
        self._connection.send(("close", "", b""))
        self.process.join()


def install_client(
    patch: pytest.MonkeyPatch, double: StoreDouble, bad_protocol: str = "rdma"
) -> list[dict[str, Any]]:
    """Make ``mooncake.store`` importable, whose client speaks to ``double`` unless it is set up
    with ``bad_protocol``; returns the options of each set-up."""
    setups: list[dict[str, Any]] = []

    class Client:
        def setup(self, **options: Any) -> int:
            setups.append(options)
            return -1 if options["protocol"] == bad_protocol else 0

        def __getattr__(self, name: str) -> Any:
            return getattr(double, name)

    module: Any = ModuleType("mooncake.store")
    module.MooncakeDistributedStore, module.ReplicateConfig = Client, SimpleNamespace
    patch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    patch.setitem(sys.modules, "mooncake.store", module)
    return setups
