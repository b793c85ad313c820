"""Opening files in folders that others can write to, which may hold a pipe or a huge file."""

from __future__ import annotations

import os
import stat
from io import BufferedReader


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # a name that no file can have
        return False


def open_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; never waits, as opening a pipe would.

    OSError: there is none, it is something else, or it has more than ``max_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(
                f"{os.fspath(path)} has {status.st_size:,} bytes, more than the {max_bytes:,} that "
                "such a file can have"
            )
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
