"""The names that trainers import to send weights to a running engine over NCCL.

This engine cannot take them, so each name raises an error that says so. Without the names, the
clients of TRL that only generate, or only read log-probabilities, could not be imported.
"""

from __future__ import annotations

from typing import Never


def refuse_transfer(*_: object, **__: object) -> Never:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "weights cannot be sent over NCCL to a running engine of this package: save them, and "
        "start the engine with them"
    )


class NoCommunicator:
    """Takes the place of a group of processes; making one raises NotImplementedError."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        refuse_transfer()

    create = staticmethod(refuse_transfer)
