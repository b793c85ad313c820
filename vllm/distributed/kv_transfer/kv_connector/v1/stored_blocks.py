"""Blocks in files that several processes share: whole or absent, checked when they are read.

    <folder>/<what the blocks fit>/<group>-<hash of the prefix>-<index>.block

A file is made under a temporary name and renamed, so one that can be seen is whole, whoever was
killed meanwhile; writers of the same block write the same bytes. Further names of a block (it
also holds shorter prefixes) are hard links. When the quota is reached, those go first that nobody
read for the longest time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import NumberedIndex
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockKey

logger = init_logger(__name__)

SUFFIX = ".block"
_TEMPORARY = ".tmp-"
_DIGEST_BYTES = 16
_ABANDONED_SECONDS = 3600.0
"""Temporary files of that age belong to nobody any more."""


class DamagedBlockError(Exception):
    """A file that does not hold what was written."""


class StoredBlocks:
    """One folder of blocks."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._written = 0
        self._used = self._remove_abandoned()

    def path(self, key: BlockKey) -> Path:
        """Where a block is, if it is there."""
        group_id, digest, index = key
        return self.folder / f"{group_id}-{digest.hex()}-{index}{SUFFIX}"

    def write(self, keys: Sequence[BlockKey], data: bytes) -> None:
        """Store a block under all of its names. OSError: it is not stored."""
        name = f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{self._written}"
        temporary = self.folder / name
        self._written += 1
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        try:
            with open(temporary, "wb") as file:
                file.write(digest)
                file.write(data)
            for key in keys[:-1]:
                with suppress(OSError):  # there already, or no links on this file system
                    os.link(temporary, self.path(key))
            os.replace(temporary, self.path(keys[-1]))
        finally:
            temporary.unlink(missing_ok=True)
        self._used += _DIGEST_BYTES + len(data)
        if self.max_bytes is not None and self._used > self.max_bytes:
            self._make_room(self.max_bytes)

    def read(self, key: BlockKey) -> bytes:
        """A block. OSError, DamagedBlockError (then it is removed): there is none."""
        path = self.path(key)
        content = path.read_bytes()
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != digest:
            path.unlink(missing_ok=True)
            raise DamagedBlockError(f"{path.name} does not have its checksum")
        with suppress(OSError):
            os.utime(path)
        return data

    def _files(self) -> list[tuple[float, int, str, int]]:
        """``(last use, bytes, name, inode)`` of every file."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, entry.name, status.st_ino))
        return sorted(found)

    def _remove_abandoned(self) -> int:
        """Drop what killed writers left; returns the bytes of blocks."""
        sizes: dict[int, int] = {}
        for last_use, size, name, inode in self._files():
            if not name.startswith(_TEMPORARY):
                sizes[inode] = size
            elif time.time() - last_use > _ABANDONED_SECONDS:
                (self.folder / name).unlink(missing_ok=True)
        return sum(sizes.values())

    def _make_room(self, max_bytes: int) -> None:
        """Remove the longest unused blocks until a tenth of the quota is free."""
        sizes: dict[int, int] = {}
        names: dict[int, list[str]] = {}
        for _, size, name, inode in self._files():
            sizes[inode] = size
            names.setdefault(inode, []).append(name)
        self._used = sum(sizes.values())
        for inode, size in sizes.items():
            if self._used <= max_bytes * 9 // 10:
                break
            for name in names[inode]:
                (self.folder / name).unlink(missing_ok=True)
            self._used -= size


class StoredIndex(NumberedIndex):
    """What the folder has."""

    def __init__(self, blocks: StoredBlocks, num_states: int) -> None:
        super().__init__(num_states)
        self._blocks = blocks

    def has(self, key: BlockKey) -> bool:
        return self._blocks.path(key).exists()
