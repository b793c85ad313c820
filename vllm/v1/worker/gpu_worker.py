"""One worker: a device, a model runner, and how much memory its pool may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import PendingOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.profile_run import profile_run

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Worker:
    """What an executor drives, in this process or another."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device_config.device_type)
        self.platform = vllm_config.device_config.platform
        self.platform.set_num_threads()
        self.model_runner = GPUModelRunner(vllm_config, self.device)

    def load_model(self) -> None:
        """Build the model and read its weights."""
        self.model_runner.load_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer of this worker keeps in the pool."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes that the pool may take, with the model loaded and beside the largest step."""
        cache_config = self.vllm_config.cache_config
        step_bytes = self.platform.measure_peak_bytes(
            lambda: profile_run(self.model_runner, self.vllm_config)
        )
        if cache_config.kv_cache_memory_bytes is not None:
            return cache_config.kv_cache_memory_bytes
        budget = self.platform.kv_cache_budget_bytes(cache_config.gpu_memory_utilization)
        return max(0, budget - step_bytes)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the pool."""
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Start a step, behind those that were started before."""
        return self.model_runner.execute_model(scheduled)

    def shutdown(self) -> None:
        """Let go of threads and memory."""
        self.model_runner.shutdown()
