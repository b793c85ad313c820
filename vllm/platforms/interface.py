"""The interface of a platform: facts about a device that the rest of the engine asks for."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm import envs

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 16
"""Tokens of one attention page: the finest unit a kernel reads at once, on any device."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST_KEPT_BYTES = 512 * 2**20
"""Free memory that the end of the heap keeps; more goes back to the system."""

# With this, torch asks for large pages for host tensors of 2 MiB and more, among them rows of
# hidden states. It reads the variable once, when it first allocates. Measured on a CPU: steps are
# 1 % shorter, a decoding product of 16 rows 8 %.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class AskedBackend(NamedTuple):
    """Attention kernels that the user named."""

    option: str
    """The argument or environment variable that names them."""
    name: str


def asked_attention_backend(asked: str | None) -> AskedBackend | None:
    """``asked`` (the option ``attention_backend``), else VLLM_ATTENTION_BACKEND."""
    if asked is not None:
        return AskedBackend("attention_backend", asked)
    if envs.VLLM_ATTENTION_BACKEND is not None:
        return AskedBackend("VLLM_ATTENTION_BACKEND", envs.VLLM_ATTENTION_BACKEND)
    return None


class Platform(ABC):
    """One kind of device."""

    device_type: ClassVar[str]
    """torch's name of the device: "cpu", "cuda"."""
    default_max_num_batched_tokens: ClassVar[int] = 4096
    """Default for the tokens of one step."""
    default_max_num_batched_tokens_of_servers: ClassVar[int] = 2048
    """The same for servers, where decoding requests wait for a step's prompts."""
    default_max_num_batched_tokens_of_stages: ClassVar[int] = 512
    """The most by default with several pipeline stages: a stage waits while the first step of some
    prompts fills the stages before it, and the last one leaves those behind it."""
    works_beside_host: ClassVar[bool] = True
    """True if the host can plan a step while the device works on the one before it."""
    retained_row_bytes: ClassVar[int | None] = None
    """Default bytes of rows that stay findable once they have left; None: all that the pool has."""
    retained_snapshot_bytes: ClassVar[int | None] = None
    """Bytes of recurrent states that stay findable; None: as many as the pool holds."""
    recurrent_chunk_tokens: ClassVar[int] = 1
    """Recurrent kernels work in chunks that start at absolute multiples of this: states kept
    there, and prompts cut there, give the bits of an uncut prompt."""

    def max_num_batched_tokens_of(self, hidden_size: int) -> int:
        """Default for the tokens of one step of a model when no client waits for tokens."""
        return self.default_max_num_batched_tokens

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        return self.device_type == "rocm"

    def is_xpu(self) -> bool:
        return self.device_type == "xpu"

    def is_tpu(self) -> bool:
        return self.device_type == "tpu"

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device in words, for logs."""

    @property
    @abstractmethod
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes a model can run in here, the preferred one first."""

    @property
    @abstractmethod
    def attention_backends(self) -> tuple[str, ...]:
        """Names of the attention kernels that can be used here, the preferred ones first."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of the device that this process could ever use."""

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Memory of the device that is free now."""

    @abstractmethod
    def kv_cache_budget_bytes(self, memory_utilization: float) -> int:
        """Bytes the KV pool may take now, with the weights loaded.

        ``memory_utilization``: ``cache_config.gpu_memory_utilization``, in (0, 1].
        """

    @abstractmethod
    def measure_peak_bytes(self, run: Callable[[], None]) -> int:
        """Measure the memory that ``run`` takes at its peak and gives back. Return 0, without
        running it, if the platform leaves room for it anyway."""

    @abstractmethod
    def measure_held_bytes(self, make: Callable[[], object]) -> int:
        """Measure the memory that ``make`` keeps; 0 in the case of :meth:`measure_peak_bytes`."""

    def prepare_process(self) -> None:
        """Tell the C library's allocator to reuse freed memory, however large the block.

        By default it returns blocks of 32 MiB and more to the system at once. Every step would then
        touch its rows, and on a CPU the outputs of its wide products, for the first time: on a CPU
        a tenth of the whole time, measured.
        """
        with suppress(AttributeError, OSError):  # a C library without these settings
            set_option = ctypes.CDLL(None).mallopt
            set_option(_M_MMAP_MAX, 0)
            set_option(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)

    @abstractmethod
    def set_num_threads(
        self, rank: int = 0, num_ranks: int = 1, num_cpus: int | None = None
    ) -> int:
        """Set the number of host threads that torch computes with, and return it.

        rank: the number of this process among ``num_ranks`` that compute on this machine.
        num_cpus: those that are reserved for it; None: ranks share the machine's.
        ValueError: it cannot have the CPUs that it is to have.
        """

    @property
    def stated_pool_bytes(self) -> int | None:
        """Size of a rank's KV pool if the environment states it."""
        return None

    @abstractmethod
    def share_of_machine(self, slot: int, num_engines: int) -> dict[str, str]:
        """Environment variables that give one of several engines its device, or its part of the
        host's threads. ValueError: there are fewer devices than engines."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError when a model of ``dtype`` cannot run here."""
        if dtype not in self.supported_dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in self.supported_dtypes)
            raise ValueError(
                f"dtype={str(dtype).removeprefix('torch.')!r} is not supported on "
                f"{self.device_name}; use one of {names}"
            )

    def choose_attention_backend(self, asked: str | None) -> str:
        """``asked``, else VLLM_ATTENTION_BACKEND, else the preferred one.

        Raises ValueError when it cannot be used here.
        """
        backend = asked_attention_backend(asked)
        if backend is None:
            return self.attention_backends[0]
        if backend.name not in self.attention_backends:
            raise ValueError(
                f"{backend.option}={backend.name!r} cannot be used on {self.device_name}: "
                f"{self.why_no_attention_backend(backend.name)}; "
                f"use {' or '.join(self.attention_backends)}, or leave it unset"
            )
        return backend.name

    def why_no_attention_backend(self, name: str) -> str:
        """The reason why ``name`` is not one of :attr:`attention_backends`."""
        return "it is for another kind of device"
