"""Facts about a device that the rest of the engine asks for."""

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
"""Free memory at the end of the heap above which it goes back to the system."""

# torch asks for large pages for its tensors on the host from 2 MiB on, rows of hidden states among
# them. It reads this once, when it first allocates. Measured on a CPU: steps 1 % shorter, a
# decoding product of 16 rows 8 %.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class AskedBackend(NamedTuple):
    """Kernels that the user named."""

    option: str
    """Where: an argument, or an environment variable."""
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
    """Tokens of one step when the user does not say."""
    default_max_num_batched_tokens_of_servers: ClassVar[int] = 2048
    """The same where requests that decode wait for a step's prompts."""
    works_beside_host: ClassVar[bool] = True
    """The host can plan a step while the device works on the one before it."""
    retained_row_bytes: ClassVar[int | None] = None
    """Hidden-state rows that stay findable after they left, by default; None: as the pool holds."""
    retained_snapshot_bytes: ClassVar[int | None] = None
    """Recurrent states that stay findable; None: as many as the pool holds."""
    recurrent_chunk_tokens: ClassVar[int] = 1
    """Recurrent kernels work in chunks that start at absolute multiples of this: states kept
    there, and prompts cut there, give the bits of an uncut prompt."""

    def max_num_batched_tokens_of(self, hidden_size: int) -> int:
        """Tokens of one step of a model, when the user does not say and nobody waits for tokens."""
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
        """Memory that ``run`` takes at its peak and gives back; 0 where room is left for it
        anyway, then it is not run."""

    @abstractmethod
    def measure_held_bytes(self, make: Callable[[], object]) -> int:
        """Memory that what ``make`` leaves behind takes; 0 like :meth:`measure_peak_bytes`."""

    def prepare_process(self) -> None:
        """Tell the C library's allocator to hand freed memory out again, however large.

        It gives blocks of 32 MiB and more back to the system at once, so that every step touches
        its rows, and on a CPU the outputs of its wide products, for the first time: a tenth of the
        whole time there, measured.
        """
        with suppress(AttributeError, OSError):  # a C library without these settings
            set_option = ctypes.CDLL(None).mallopt
            set_option(_M_MMAP_MAX, 0)
            set_option(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)

    @abstractmethod
    def set_num_threads(self) -> int:
        """Set the number of host threads torch computes with; returns it."""

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
        wanted = asked_attention_backend(asked)
        if wanted is None:
            return self.attention_backends[0]
        if wanted.name not in self.attention_backends:
            raise ValueError(
                f"{wanted.option}={wanted.name!r} cannot be used on {self.device_name}: "
                f"{self.why_no_attention_backend(wanted.name)}; "
                f"use {' or '.join(self.attention_backends)}, or leave it unset"
            )
        return wanted.name

    def why_no_attention_backend(self, name: str) -> str:
        """Why ``name`` is none of :attr:`attention_backends`."""
        return "it is for another kind of device"
