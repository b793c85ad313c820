"""The CPU of this machine."""

from __future__ import annotations

import os
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

    def set_num_threads(
        self, rank: int = 0, num_ranks: int = 1, num_cpus: int | None = None
    ) -> int:
        """Use VLLM_CPU_THREADS, else OMP_NUM_THREADS, else one for each CPU that this rank is bound
        to, else those reserved for it, else its share of the cores that this process may use."""
        bound = self._bind(rank, num_ranks)
        free = usable_core_count() - envs.VLLM_CPU_NUM_OF_RESERVED_CPU
        share = num_cpus or max(1, free // num_ranks)
        own = share if bound is None else len(bound)
        num_threads = envs.VLLM_CPU_THREADS or envs.OMP_NUM_THREADS or own
        if torch.get_num_threads() != num_threads:
            logger.info_once("computing on %d CPU threads", num_threads)
            torch.set_num_threads(num_threads)
        return num_threads

    @staticmethod
    def _bind(rank: int, num_ranks: int) -> frozenset[int] | None:
        """Bind this thread, and those that it starts, to the rank's CPUs; None: to none."""
        lists = envs.VLLM_CPU_OMP_THREADS_BIND
        if lists is None:
            return None
        if len(lists) < num_ranks:
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND has {len(lists)} lists of CPUs for {num_ranks} ranks; "
                "give one for each, separated by |"
            )
        try:
            os.sched_setaffinity(0, lists[rank])
        except OSError as error:
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND: rank {rank} cannot run on the CPUs "
                f"{sorted(lists[rank])} ({error.strerror}); this process may use "
                f"{sorted(os.sched_getaffinity(0))}"
            ) from error
        return frozenset(os.sched_getaffinity(0))  # without those that the machine does not have

    @property
    def stated_pool_bytes(self) -> int | None:
        stated = envs.VLLM_CPU_KVCACHE_SPACE
        return None if stated is None else int(stated * 2**30)

    def share_of_machine(self, slot: int, num_engines: int) -> dict[str, str]:
        return {"VLLM_CPU_THREADS": str(max(1, self.set_num_threads() // num_engines))}
