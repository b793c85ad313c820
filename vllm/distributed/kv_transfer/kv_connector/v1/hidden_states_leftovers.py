"""What writers that died left in a storage folder: temporary files, and locks of no file.

A writer holds ``flock`` on ``<file>.lock`` while it works, and the kernel frees it with the
process, so a lock that can be taken tells that its writer is gone. Only names that the engine
makes are looked at, and only files of this user.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_lock import lock_path_of
from vllm.logger import init_logger

logger = init_logger(__name__)

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.tmp")
_LOCK = re.compile(r"(?P<name>[^.].*\.safetensors)\.lock")
UNLOCKED_SECONDS = 3600.0
"""Age at which a temporary file without a lock is given up: writers may work without locks."""
LONE_LOCK_SECONDS = 0.5
"""Age at which an empty lock that nobody holds and that has no file is given up: a writer makes
it and takes it at once."""


def remove_leftovers(folder: str, unlocked_seconds: float = UNLOCKED_SECONDS) -> int:
    """Remove what dead writers left in ``folder``; the number of files removed."""
    num_removed = 0
    with suppress(FileNotFoundError):
        # Temporary files first: whether they are in use, their locks tell.
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name[0] != "."):
            with suppress(OSError):
                num_removed += _remove_leftover(folder, entry, unlocked_seconds)
    if num_removed:
        logger.info("Removed %d files that dead writers left in %s", num_removed, folder)
    return num_removed


def _remove_leftover(folder: str, entry: os.DirEntry[str], unlocked_seconds: float) -> int:
    temporary, lock = _TEMPORARY.fullmatch(entry.name), _LOCK.fullmatch(entry.name)
    found = temporary or lock
    if found is None or not entry.is_file(follow_symlinks=False):
        return 0
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid():
        return 0
    path = os.path.join(folder, found["name"])
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
    """Remove the temporary file and the lock of ``path`` unless somebody holds the lock."""
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
    """Hold a lock inside the block, if nobody else does."""
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
