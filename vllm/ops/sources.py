"""Sources of operations: the implementations that each type of device uses."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.ops import native
from vllm.ops.operation import Operation, Source, use_sources

logger = init_logger(__name__)


_PLAIN_IS = (
    "The results are the same within rounding, but it is slower, and a row's last bits may depend "
    "on the batch."
)


class OverrideSource(Source):
    """Functions that are marked as overrides for a type of device."""

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self._device_type = device_type

    def find(self, operation: Operation[Any]) -> Callable[..., None] | None:
        return operation.overrides.get(self._device_type)


@functools.cache
def find_source(device_type: str) -> Source:
    """The source of operations for a type of device ("cpu", "cuda", ...), one object per process.

    On the CPU this is the library of ``csrc/cpu`` if it works, on CUDA the Triton kernels if Triton
    is installed; else it is the plain bodies, with a warning. ``VLLM_KERNELS`` forces one or the
    other. Raises RuntimeError if the native ones are forced and cannot be used, ValueError for a
    ``VLLM_CPU_ISA`` that this CPU does not have.
    """
    option = envs.VLLM_KERNELS
    if option == "native" and device_type != "cpu":
        raise RuntimeError(
            f"VLLM_KERNELS=native: there are native kernels only for the CPU, not for "
            f"{device_type!r}; unset it or use VLLM_KERNELS=plain"
        )
    if option == "plain":
        logger.warning("VLLM_KERNELS=plain: plain torch computes. %s", _PLAIN_IS)
        return Source()
    if device_type == "cuda":
        return _triton_or_plain()
    return _native_or_plain(forced=option == "native")


use_sources(find_source)


def kernels_of(device_type: str) -> str:
    """Name the kernels of a type of device: other kernels may give other bits."""
    name = find_source(device_type).name
    if device_type != "cpu":
        return name
    return f"{name}, torch for {torch.backends.cpu.get_cpu_capability()}"


def _triton_or_plain() -> Source:
    problem = why_no_triton()
    if problem is not None:
        logger.warning("%s. Plain torch is used instead, which is much slower.", problem)
        return Source()
    import vllm.ops.cuda  # noqa: F401  its overrides

    # Sums of 16-bit products stay in float32, even if cuBLAS splits them.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return OverrideSource("triton", "cuda")


def why_no_triton() -> str | None:
    """The reason why Triton's kernels cannot run on this machine; None if they can.

    Triton builds their launcher at first use. It needs a C compiler and Python's headers for that,
    unless an earlier process left the launcher in Triton's cache.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if torch.cuda.is_available():
        try:
            triton.runtime.driver.active.get_current_target()
        except Exception as error:  # of any kind: from the compiler, a missing file, Triton itself
            return f"Triton cannot launch kernels here ({type(error).__name__}: {error})"
    return None


def _native_or_plain(*, forced: bool) -> Source:
    """The native CPU kernels; if they cannot be used, the plain bodies, unless ``forced``."""
    try:
        library = native.load_library(envs.VLLM_CPU_ISA)
    except native.NativeKernelsUnavailable as error:
        if forced:
            raise RuntimeError(f"VLLM_KERNELS=native: {error}") from error
        logger.warning(
            "The native CPU kernels cannot be used: %s. Plain torch is used instead. %s",
            error,
            _PLAIN_IS,
        )
        return Source()
    logger.info_once("CPU kernels: %s", library.isa)
    return library
