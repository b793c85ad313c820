"""Errors that callers of an engine in another process can catch."""

from __future__ import annotations

from vllm.exceptions import Failure, FailureError, FailureKind


class EngineDeadError(FailureError):
    """The engine core's process ended: requests under way are lost, new ones are refused."""

    def __init__(self, message: str) -> None:
        super().__init__(Failure(FailureKind.ENGINE_DEAD, message))
        self.args = (message,)
