"""A client with the API of Mooncake's, whose objects are in another process."""

from __future__ import annotations

import ctypes
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

NO_ROOM, NOT_THERE, EXISTS = -200, -704, -705


def _serve(connection: Connection, most_bytes: int) -> None:
    objects: dict[str, bytes] = {}
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
        elif method == "remove":
            connection.send(NOT_THERE if objects.pop(key, None) is None else 0)
        elif method == "keys":
            connection.send(sorted(objects))
        else:
            return


class StoreDouble:
    """Reads and writes by pointers, and refuses memory that was not registered."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, most_bytes), daemon=True)
        self.process.start()
        other.close()
        self.registered: dict[int, int] = {}
        self.configs: list[Any] = []

    def _ask(self, method: str, key: str = "", value: bytes = b"") -> Any:
        self._connection.send((method, key, value))
        return self._connection.recv()

    def keys(self) -> list[str]:
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
        return int(self._ask("get", key) is not None)

    def remove(self, key: str) -> int:
        status: int = self._ask("remove", key)
        return status

    def close(self) -> None:
        self._connection.send(("close", "", b""))
        self.process.join()
