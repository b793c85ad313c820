"""Free space on a disk, checked before much is written to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.utils.mem_utils import format_bytes

FILE_BYTES = 8 << 10
"""Bytes that a file takes besides its content: a header, and the rest of its last block."""


def free_bytes(folder: str | Path) -> int:
    """Bytes that this user may still write to the folder's disk; the folder need not exist yet."""
    path = Path(folder).absolute()
    existing = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(existing).free


def check_room(what: str, folder: str | Path, num_bytes: int, advice: str) -> None:
    """Raise ValueError if this does not fit on the folder's disk. ``what``: the folder's option."""
    free = free_bytes(folder)
    if num_bytes > free:
        raise ValueError(
            f"{what} {folder}: the dataset takes {format_bytes(num_bytes)} more, and "
            f"{format_bytes(free)} are free on that disk; free some space, choose another folder, "
            f"{advice}"
        )
