"""Types for everything that can go wrong. The code that detects a failure states its kind; no
code reads a message to find it out.

A :class:`Failure` is plain data that crosses processes in the engine's messages. Its kind is
mapped once to each result that callers see: the HTTP status and the type of the error
(``entrypoints/openai/errors.py``), the exit status of a command (:data:`EXIT_STATUS`), and the
treatment of a sample of a dataset (``entrypoints/extract/worker.py``).
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Mapping
from dataclasses import dataclass


class FailureKind(enum.StrEnum):
    """The kinds of failure that callers treat differently."""

    BAD_REQUEST = "bad_request"
    """The request cannot be served; raised as ValueError."""
    NOT_READY = "not_ready"
    """The engine sleeps, or its weights are not whole; raised as NotReadyError."""
    NOT_STARTED = "not_started"
    """The server could not start because of its model, its options or its address."""
    ROWS_NOT_FINITE = "rows_not_finite"
    ROWS_ALL_ZERO = "rows_all_zero"
    LOGITS_NOT_FINITE = "logits_not_finite"
    """The logits of a request without rows; rows would show the place."""
    DISK_FULL = "disk_full"
    NOT_PERMITTED = "not_permitted"
    """This user may not write to the path."""
    WRITE_FAILED = "write_failed"
    """A file cannot be written for another reason."""
    FILE_GONE = "file_gone"
    """A file that existed before is missing."""
    FILE_DAMAGED = "file_damaged"
    """A file differs from what was written."""
    OUT_OF_MEMORY = "out_of_memory"
    STEP_FAILED = "step_failed"
    """A step of the engine raised an exception."""
    CONNECTOR_FAILED = "connector_failed"
    TRANSFER_FAILED = "transfer_failed"
    """Weights that a trainer should send did not come."""
    ENGINE_DEAD = "engine_dead"
    """The engine's process ended."""
    STREAM_STALLED = "stream_stalled"
    """The other end of a stream of samples did not go on in time."""
    JOB_FAILED = "job_failed"
    """A command ended before all of its work was done."""
    ABORTED = "aborted"
    """The result is no longer wanted."""


@dataclass(frozen=True)
class Failure:
    """The reason why there is no result."""

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
    """Return the kind of failure that an exception's class or errno stands for."""
    if isinstance(error, FailureError):
        return error.failure.kind
    if isinstance(error, MemoryError):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, OSError):
        return _OF_ERRNO.get(error.errno or 0, otherwise)
    return otherwise


class FailureError(RuntimeError):
    """An exception that carries a :class:`Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class NotReadyError(ValueError):
    """The engine serves no request now; the same request may succeed later."""


class VLLMValidationError(ValueError):
    """A request cannot be served; ``parameter`` names the field that is wrong."""

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


EXIT_STATUS: Mapping[FailureKind, int] = dict.fromkeys(FailureKind, 1) | {
    FailureKind.BAD_REQUEST: 2,
    FailureKind.ABORTED: 130,
}
"""Exit status of a command that ends with this kind of failure."""
