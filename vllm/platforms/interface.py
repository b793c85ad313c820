"""Facts about a device that the rest of the engine asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from vllm import envs

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of device."""

    device_type: ClassVar[str]
    """torch's name of the device: "cpu", "cuda"."""
    default_max_num_batched_tokens: ClassVar[int] = 2048
    """Tokens of one step when the user does not say."""
    recurrent_chunk_tokens: ClassVar[int] = 1
    """Recurrent kernels work in chunks that start at absolute multiples of this: states kept
    there, and prompts cut there, give the bits of an uncut prompt."""

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

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

    @abstractmethod
    def set_num_threads(self) -> int:
        """Set the number of host threads torch computes with; returns it."""

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
        option, wanted = "attention_backend", asked
        if wanted is None:
            option, wanted = "VLLM_ATTENTION_BACKEND", envs.VLLM_ATTENTION_BACKEND
        if wanted is None:
            return self.attention_backends[0]
        if wanted not in self.attention_backends:
            raise ValueError(
                f"{option}={wanted!r} cannot be used on {self.device_name}; "
                f"use {' or '.join(self.attention_backends)}, or leave it unset"
            )
        return wanted
