"""Room on a disk, looked at before much is written to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.utils.mem_utils import format_bytes

FILE_BYTES = 8 << 10
"""What a file takes beside its content: a header, and the rest of its last block."""


def free_bytes(folder: str | Path) -> int:
    """What this user may still write where the folder is, or will be."""
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(there).free


def check_room(what: str, folder: str | Path, num_bytes: int, advice: str) -> None:
    """ValueError: so much does not fit on the folder's disk. ``what``: the option that named it."""
    free = free_bytes(folder)
    if num_bytes > free:
        raise ValueError(
            f"{what} {folder}: the dataset takes {format_bytes(num_bytes)} more, and "
            f"{format_bytes(free)} are free on that disk; free some space, choose another folder, "
            f"{advice}"
        )
