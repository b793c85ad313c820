"""The kernels of each device; :func:`get_kernels` chooses."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.kernels.base import Kernels, PagedAttention
    from vllm.kernels.flashinfer_attention import FlashInferAttention

logger = init_logger(__name__)


@functools.cache
def get_kernels(device_type: str) -> Kernels:
    """The kernels of a device type ("cpu", "cuda", ...), one object a process.

    On the CPU these are the native ones where the library works, on CUDA those in Triton
    where it is installed, else the plain ones, with a warning. ``VLLM_KERNELS`` forces one or
    the other. Raises RuntimeError when the native ones are forced and cannot be used,
    ValueError for a ``VLLM_CPU_ISA`` that this CPU does not have.
    """
    from vllm.kernels.plain import PlainKernels  # torch is not needed before this point

    wanted = envs.VLLM_KERNELS
    if wanted == "native" and device_type != "cpu":
        raise RuntimeError(
            f"VLLM_KERNELS=native: there are native kernels for the CPU only, not for "
            f"{device_type!r}; unset it or use VLLM_KERNELS=plain"
        )
    if wanted == "plain":
        return PlainKernels()
    if device_type == "cuda":
        return _cuda_or_plain()
    return _native_or_plain(forced=wanted == "native")


def get_paged_attention(device_type: str, backend: str) -> PagedAttention:
    """Attention of a device by the name of its backend (``Platform.attention_backends``)."""
    if backend == "FLASHINFER":
        return _flashinfer().paged_attention
    return get_kernels(device_type).paged_attention


@functools.cache
def _flashinfer() -> FlashInferAttention:
    from vllm.kernels.flashinfer_attention import FlashInferAttention

    return FlashInferAttention()


def _cuda_or_plain() -> Kernels:
    from vllm.kernels.plain import PlainKernels

    problem = why_no_triton()
    if problem is not None:
        logger.warning("%s. Plain torch takes its place: much slower.", problem)
        return PlainKernels()
    from vllm.kernels.cuda import CudaKernels

    return CudaKernels()


def why_no_triton() -> str | None:
    """Why Triton's kernels cannot run on this machine; None when they can.

    Triton builds what launches them at first use: it needs a C compiler and Python's headers,
    unless an earlier process left it in Triton's cache.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import torch
    import triton

    if torch.cuda.is_available():
        try:
            triton.runtime.driver.active.get_current_target()
        except Exception as error:  # of any kind: a compiler's, a missing file's, Triton's own
            return f"Triton cannot launch kernels here ({type(error).__name__}: {error})"
    return None


def _native_or_plain(*, forced: bool) -> Kernels:
    """The native CPU kernels; without them the plain ones, unless ``forced``."""
    from vllm.kernels.native_cpu import NativeCpuKernels, NativeKernelsUnavailable
    from vllm.kernels.plain import PlainKernels

    try:
        return NativeCpuKernels.load(envs.VLLM_CPU_ISA)
    except NativeKernelsUnavailable as error:
        if forced:
            raise RuntimeError(f"VLLM_KERNELS=native: {error}") from error
        logger.warning(
            "The native CPU kernels cannot be used: %s. Plain torch takes their place: "
            "same results within rounding, slower.",
            error,
        )
        return PlainKernels()
