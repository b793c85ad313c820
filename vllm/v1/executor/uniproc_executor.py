"""The executor in the engine core's own process, and all that the core sees of the worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import PendingOutput
from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.hook_points import HookPoint


class UniProcExecutor:
    """Calls the worker directly."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.worker = Worker(vllm_config)
        try:
            self.worker.load_model()
        except BaseException:
            self.shutdown()
            raise

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.worker.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_from_config(kv_cache_config)

    def no_norm_reason(self) -> str | None:
        """Return why rows cannot have the state after the final norm; None: they can."""
        return self.worker.model_runner.no_norm_reason

    def no_steering_reason(self) -> str | None:
        """Return why nothing can be added to the model's stream; None: it can."""
        return self.worker.model_runner.no_steering_reason

    def no_head_reason(self) -> str | None:
        """Return why the model computes no logits; None: it does."""
        return self.worker.model_runner.no_head_reason

    def find_hooks(self, names: Iterable[str]) -> list[HookPoint]:
        """Return the model's hook points of these names. ValueError: it has no such point."""
        return [self.worker.model_runner.hook_points.find(name) for name in names]

    def get_kv_connector_handshake_metadata(self) -> Any:
        """Return the data by which others reach the connector's worker side; None: none."""
        connector = self.worker.model_runner.connector
        return None if connector is None else connector.connector.get_handshake_metadata()

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        return self.worker.model_runner.execute_model(scheduled)

    def shutdown(self) -> None:
        """End the worker, which frees the weights and the pool."""
        self.worker.model_runner.shutdown()
        del self.worker
