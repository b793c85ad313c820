"""What can go wrong, as types. The part that sees it says of which kind it is; nobody reads a
message to find out.

A :class:`Failure` is plain data that crosses processes in the engine's messages. Its kind is
mapped once to each of what callers see: the HTTP status and the type of the error
(``entrypoints/openai/errors.py``), the exit status of a command (:data:`EXIT_STATUS`), what
becomes of a sample of a dataset (``entrypoints/extract/worker.py``).
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Mapping
from dataclasses import dataclass


class FailureKind(enum.StrEnum):
    """What went wrong, as far as it makes a difference to anybody."""

    BAD_REQUEST = "bad_request"
    """What was asked for cannot be served; ValueError, where it is raised."""
    NOT_STARTED = "not_started"
    """A server that could not start: its model, its options, its address."""
    ROWS_NOT_FINITE = "rows_not_finite"
    ROWS_ALL_ZERO = "rows_all_zero"
    LOGITS_NOT_FINITE = "logits_not_finite"
    """Of a request without rows, which would have said where."""
    DISK_FULL = "disk_full"
    NOT_PERMITTED = "not_permitted"
    """A path that this user may not write."""
    WRITE_FAILED = "write_failed"
    """A file that cannot be written, for another reason."""
    FILE_GONE = "file_gone"
    """A file that was there."""
    FILE_DAMAGED = "file_damaged"
    """A file that is not what was written."""
    OUT_OF_MEMORY = "out_of_memory"
    STEP_FAILED = "step_failed"
    """An exception in a step of the engine."""
    CONNECTOR_FAILED = "connector_failed"
    ENGINE_DEAD = "engine_dead"
    """The engine's process ended."""
    JOB_FAILED = "job_failed"
    """A command that ended before all of its work was done."""
    ABORTED = "aborted"
    """Nobody wants it any more."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return self.message


_OF_ERRNO = {
    errno.ENOSPC: FailureKind.DISK_FULL,
    errno.EDQUOT: FailureKind.DISK_FULL,
    errno.EACCES: FailureKind.NOT_PERMITTED,
    errno.EROFS: FailureKind.NOT_PERMITTED,
}


def kind_of(error: BaseException, otherwise: FailureKind) -> FailureKind:
    """The kind that an exception's class, or the operating system's number, tells."""
    if isinstance(error, FailureError):
        return error.failure.kind
    if isinstance(error, MemoryError):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, OSError):
        return _OF_ERRNO.get(error.errno or 0, otherwise)
    return otherwise


class FailureError(RuntimeError):
    """A failure, raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class VLLMValidationError(ValueError):
    """A request that cannot be served; ``parameter`` names the field that is wrong."""

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


EXIT_STATUS: Mapping[FailureKind, int] = dict.fromkeys(FailureKind, 1) | {
    FailureKind.BAD_REQUEST: 2,
    FailureKind.ABORTED: 130,
}
"""Exit status of a command that ends for this reason."""
