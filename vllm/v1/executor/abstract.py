"""Where the workers are: the engine core sees only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import PendingOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Executor(ABC):
    """Drives one worker or several, all through the same steps."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start the workers and load the model."""

    @abstractmethod
    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """What the layers of each worker keep in the pool."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Bytes that the pool of each worker may take."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the pools."""

    @abstractmethod
    def get_kv_connector_handshake_metadata(self) -> dict[int, Any]:
        """What the workers' sides of the connector tell those who want to reach them, by rank."""

    @abstractmethod
    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Start a step on all workers; the output of the one that samples."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers."""
