"""Worker half of a spec: what moves blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""From, to: as many blocks on both sides, in the same order."""
TransferType = tuple[str, str]
"""Media of both."""


@dataclass
class TransferResult:
    """How a transfer ended."""

    job_id: int
    success: bool
    transfer_size: int | None = None
    """Bytes."""
    transfer_time: float | None = None
    """Seconds."""
    transfer_type: TransferType | None = None


class OffloadingHandler(ABC):
    """Moves blocks one way."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer, behind what the device was given; whether it was begun."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Transfers that ended since the last call."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Return when these have ended."""

    def shutdown(self) -> None:  # noqa: B027
        """Let go of everything."""
