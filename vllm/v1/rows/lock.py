"""The lock beside a file: held while the file is being made, free once it is complete.

Clients open ``<path>.lock``, wait until they get the ``flock``, and then own both files;
they may remove the lock (docs: "The file"). The kernel frees a lock when its process ends, so a
lock that can be taken shows that its writer is gone. :func:`remove_leftovers` removes the files of
such writers. It looks only at names that the engine makes, and at files of this user.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vllm.logger import init_logger
from vllm.utils.whole_files import TemporaryName

logger = init_logger(__name__)

_LOCK = re.compile(r"(?P<name>[^.].*\.safetensors)\.lock")
UNLOCKED_SECONDS = 3600.0
"""Age at which a temporary file without a lock is removed: writers may work without locks."""
LONE_LOCK_SECONDS = 0.5
"""Age at which an empty lock that is free and has no file is removed: a writer takes a lock as
soon as it has made it."""


def lock_path_of(path: str) -> str:
    """Return the path of a file's lock."""
    return path + ".lock"


def take_lock(path: str) -> int:
    """Return a descriptor that holds an exclusive ``flock`` on ``<path>.lock`` until it is closed.

    The lock is free once every duplicate of the descriptor is closed, too; clients get it then,
    and the lock file stays. BlockingIOError: another process holds it.
    """
    return _open_locked(lock_path_of(path))


def remove_lock(path: str) -> None:
    """Remove the lock file of ``path``: no file will come."""
    with suppress(OSError):
        os.unlink(lock_path_of(path))


def wait_until_unlocked(path: str) -> None:
    """Wait until the file at ``path`` is no longer being made; return at once if it has no lock."""
    try:
        descriptor = os.open(lock_path_of(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _open_locked(path: str) -> int:
    while True:
        # A link could lead anywhere, and the folder may be open to others.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A client may have removed the old file between the two calls.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def remove_leftovers(folder: str, unlocked_seconds: float = UNLOCKED_SECONDS) -> int:
    """Remove what dead writers left in ``folder``; returns the number of files removed."""
    num_removed = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        # Temporary files first: their locks tell whether they are in use.
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name[0] != "."):
            with suppress(OSError):
                num_removed += _remove_leftover(folder, entry, unlocked_seconds)
    if num_removed:
        logger.info("Removed %d files that dead writers left in %s", num_removed, folder)
    return num_removed


def _remove_leftover(folder: str, entry: os.DirEntry[str], unlocked_seconds: float) -> int:
    temporary, lock = TemporaryName.parse(entry.name), _LOCK.fullmatch(entry.name)
    name = temporary.name if temporary is not None else lock and lock["name"]
    if name is None or not entry.is_file(follow_symlinks=False):
        return 0
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid():
        return 0
    path = os.path.join(folder, name)
    age_seconds = time.time() - status.st_mtime
    if lock is not None:
        is_old = age_seconds > min(LONE_LOCK_SECONDS, unlocked_seconds)
        is_orphan = status.st_size == 0 and is_old and not os.path.exists(path)
        return _remove_with_lock(path) if is_orphan else 0
    if not os.path.exists(lock_path_of(path)):
        if age_seconds <= unlocked_seconds:
            return 0
        os.unlink(entry.path)
        return 1
    return _remove_with_lock(path, entry.path)


def _remove_with_lock(path: str, temporary: str | None = None) -> int:
    """Remove the temporary file and the lock of ``path`` unless the lock is held."""
    with _try_lock(lock_path_of(path)) as is_free:
        if not is_free:
            return 0
        num_removed = 0
        if temporary is not None:
            os.unlink(temporary)
            num_removed += 1
        if not os.path.exists(path):
            os.unlink(lock_path_of(path))
            num_removed += 1
        return num_removed


@contextmanager
def _try_lock(lock_path: str) -> Iterator[bool]:
    """Hold a lock inside the block, if it is free; yields whether it is."""
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
