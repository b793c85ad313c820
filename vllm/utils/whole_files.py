"""Files that appear complete: they are written under a temporary name, then renamed.

    .<name>.<32 hexadecimal digits>.tmp             temporary name beside <name>
    .<name>.<owner>.<32 hexadecimal digits>.tmp     the same for one of several writers

Temporary names are hidden, and nothing else uses them, so leftovers of killed writers can be told
from all other files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from vllm.utils.regular_files import is_regular

_NAME_BYTES_KEPT = 128
_TEMPORARY = re.compile(
    r"\.(?P<name>.*?)(?:\.(?P<owner>[a-z]+-\d+))?\.[0-9a-f]{32}\.tmp", re.DOTALL
)


class TemporaryName(NamedTuple):
    """The parts of a temporary name."""

    name: str
    """The final name, or its first 128 bytes."""
    owner: str | None

    @classmethod
    def parse(cls, name: str) -> TemporaryName | None:
        """Split a temporary name; return None for any other name."""
        found = _TEMPORARY.fullmatch(name)
        return None if found is None else cls(found["name"], found["owner"])


def temporary_path(path: str | os.PathLike[str], owner: str | None = None) -> str:
    """A new temporary name beside ``path``. owner: letters, a hyphen and digits."""
    folder, name = os.path.split(path)
    kept = os.fsencode(name)[:_NAME_BYTES_KEPT].decode(errors="ignore")
    parts = [kept, uuid.uuid4().hex] if owner is None else [kept, owner, uuid.uuid4().hex]
    path = os.path.join(folder, f".{'.'.join(parts)}.tmp")
    assert TemporaryName.parse(os.path.basename(path)) == (kept, owner), path
    return path


def write_whole(path: str | os.PathLike[str], content: bytes, owner: str | None = None) -> None:
    """Write a file and wait for the disk; until then an older file of that name stays.

    OSError: it cannot be written, or the name is that of a folder, a device or a pipe.
    """
    if os.path.exists(path) and not is_regular(path):
        number = errno.EISDIR if os.path.isdir(path) else errno.EINVAL
        raise OSError(number, "not a regular file, so it is not replaced", os.fspath(path))
    temporary = temporary_path(path, owner)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_path(os.path.dirname(path) or ".")


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder. It is renamed first, so that nobody finds a part of it. What cannot be
    removed stays."""
    temporary = temporary_path(path)
    with suppress(OSError):
        os.rename(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary(
    folder: str | os.PathLike[str],
    owners: Collection[str] | None = None,
    least_age_seconds: float = 0.0,
) -> None:
    """Remove the temporary files and folders that killed writers left in ``folder``.

    owners: remove only theirs; they must not be writing. None: remove those of all writers.
    Whatever this process may not remove stays.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            temporary = TemporaryName.parse(entry.name)
            if temporary is not None and (owners is None or temporary.owner in owners):
                with suppress(OSError):
                    _remove(entry, least_age_seconds)


def _remove(entry: os.DirEntry[str], least_age_seconds: float) -> None:
    age_limit = time.time() - least_age_seconds
    if least_age_seconds and entry.stat(follow_symlinks=False).st_mtime > age_limit:
        return
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        os.unlink(entry.path)
