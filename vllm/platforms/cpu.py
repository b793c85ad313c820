"""The CPU of this machine."""

from __future__ import annotations

import platform as host
from collections.abc import Callable

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.interface import Platform
from vllm.utils.cpu_utils import usable_core_count
from vllm.utils.mem_utils import available_memory_bytes, total_memory_bytes

logger = init_logger(__name__)

_POOL_PART_OF_FREE_MEMORY = 0.5
"""The rest stays for activations, for rows on their way to a file, and for other programs."""


class CpuPlatform(Platform):
    """The CPU; memory and cores are counted within the limits of the control group."""

    device_type = "cpu"
    works_beside_host = False
    retained_row_bytes = 64 * 2**20
    # Blocks that are rewritten often stay close to the processor; new ones cost page faults, and
    # memory that other programs could use.
    retained_snapshot_bytes = 512 * 2**20

    @property
    def device_name(self) -> str:
        return f"CPU ({host.machine()})"

    @property
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)

    @property
    def attention_backends(self) -> tuple[str, ...]:
        return ("CPU_ATTN",)

    def total_memory_bytes(self) -> int:
        return total_memory_bytes()

    def available_memory_bytes(self) -> int:
        return available_memory_bytes()

    def kv_cache_budget_bytes(self, memory_utilization: float) -> int:
        return int(available_memory_bytes() * memory_utilization * _POOL_PART_OF_FREE_MEMORY)

    def measure_peak_bytes(self, run: Callable[[], None]) -> int:
        return 0  # _POOL_PART_OF_FREE_MEMORY leaves room

    def measure_held_bytes(self, make: Callable[[], object]) -> int:
        return 0

    def set_num_threads(self, num_ranks: int = 1) -> int:
        """Use VLLM_CPU_THREADS, else OMP_NUM_THREADS, else this rank's share of the cores."""
        own_cores = max(1, usable_core_count() // num_ranks)
        num_threads = envs.VLLM_CPU_THREADS or envs.OMP_NUM_THREADS or own_cores
        if torch.get_num_threads() != num_threads:
            logger.info_once("computing on %d CPU threads", num_threads)
            torch.set_num_threads(num_threads)
        return num_threads

    def share_of_machine(self, slot: int, num_engines: int) -> dict[str, str]:
        return {"VLLM_CPU_THREADS": str(max(1, self.set_num_threads() // num_engines))}
