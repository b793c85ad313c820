"""What callers of an engine in another process can catch."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine core's process ended: requests under way are lost, new ones refused."""
