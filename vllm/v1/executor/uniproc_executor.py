"""One worker in the process of the engine core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import PendingOutput
from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UniProcExecutor(Executor):
    """Calls the worker directly."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.worker = Worker(vllm_config)
        try:
            self.worker.load_model()
        except BaseException:
            self.shutdown()
            raise

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.worker.get_kv_cache_spec()]

    def determine_available_memory(self) -> list[int]:
        return [self.worker.determine_available_memory()]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        (config,) = kv_cache_configs
        self.worker.initialize_from_config(config)

    def get_kv_connector_handshake_metadata(self) -> dict[int, Any]:
        connector = self.worker.model_runner.connector
        told = None if connector is None else connector.connector.get_handshake_metadata()
        return {} if told is None else {0: told}

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        return self.worker.execute_model(scheduled)

    def shutdown(self) -> None:
        self.worker.shutdown()
        del self.worker  # and with it the weights and the pool
