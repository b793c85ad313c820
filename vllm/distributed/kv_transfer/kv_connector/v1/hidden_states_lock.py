"""The lock beside a file: held while the file is being made, free once it is whole.

Clients open ``<path>.lock``, wait until they get the ``flock``, and then own both files;
they may remove the lock (docs: "The file").
"""

from __future__ import annotations

import contextlib
import fcntl
import os


def lock_path_of(path: str) -> str:
    """Where the lock of a file lies."""
    return path + ".lock"


class FileLock:
    """An exclusive ``flock`` on ``<path>.lock``, taken when the object is made.

    Raises BlockingIOError when somebody else holds it.
    """

    def __init__(self, path: str) -> None:
        self.path = lock_path_of(path)
        self._descriptor: int | None = _open_locked(self.path)

    def duplicate(self) -> int:
        """Another descriptor of the same lock, which the receiver closes.

        The lock is free only when both are closed.
        """
        assert self._descriptor is not None, "the lock is free"
        return os.dup(self._descriptor)

    def release(self) -> None:
        """Let clients in; the lock file stays. It is not touched again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def remove(self) -> None:
        """Take the lock file away: no file will come."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.release()


def wait_until_unlocked(path: str) -> None:
    """Return when nobody makes the file at ``path``; at once when there is no lock."""
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A client may have removed the old file between the two calls.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
