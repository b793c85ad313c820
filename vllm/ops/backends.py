"""Kernels that an option names: finding them, and an error at start-up if they cannot be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm import envs
from vllm.ops.attention import paged_attention
from vllm.ops.operation import source_of
from vllm.ops.sources import why_no_triton
from vllm.platforms.interface import AskedBackend

if TYPE_CHECKING:
    from vllm.ops.cuda.flashinfer_attention import FlashInferAttention


def get_paged_attention(device_type: str, backend: str) -> Callable[..., None]:
    """Attention by the name of its backend (``Platform.attention_backends``).

    Its arguments are those of :func:`vllm.ops.attention.paged_attention`.
    """
    if backend == "FLASHINFER":
        return _flashinfer().paged_attention
    return paged_attention


def attention_scratch_bytes(device_type: str, max_seq_len: int) -> int:
    """Most memory that attention takes besides its result; 0 on a CPU."""
    if device_type != "cuda" or source_of("cuda").name == "plain":
        return 0
    from vllm.ops.cuda import triton_attention

    return triton_attention.attention_scratch_bytes(max_seq_len)


@functools.cache
def _flashinfer() -> FlashInferAttention:
    from vllm.ops.cuda.flashinfer_attention import FlashInferAttention

    return FlashInferAttention()


def check_attention_backend(
    asked: AskedBackend | None,
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    has_sinks: bool,
    *,
    has_chunks: bool = False,
    shares_values: bool = False,
) -> None:
    """Raise ValueError if layers of this kind cannot use the attention backend asked for.

    ``Platform.choose_attention_backend`` has checked that the device has it. shares_values: values
    lie inside the keys (latent attention).
    """
    if asked is None or device_type != "cuda":
        return
    problem = _why_no_triton_kernels(asked.option)
    if problem is None and asked.name == "FLASHINFER":
        problem = _why_no_flashinfer(dtype, head_size, has_sinks, has_chunks, shares_values)
    if problem is not None:
        raise ValueError(f"{asked.option}={asked.name!r} cannot be used: {problem}")


def check_delta_rule_backend(device_type: str, dtype: torch.dtype) -> None:
    """Raise ValueError if recurrent layers cannot use the kernels that VLLM_GDN_BACKEND names."""
    name = envs.VLLM_GDN_BACKEND
    if name is None:
        return
    if device_type != "cuda":
        problem: str | None = f"it names kernels of CUDA, not of device={device_type!r}; unset it"
    else:
        problem = _why_no_triton_kernels("VLLM_GDN_BACKEND")
    if problem is None and name == "FLA":
        problem = _why_no_fla(dtype)
    if problem is not None:
        raise ValueError(f"VLLM_GDN_BACKEND={name!r} cannot be used: {problem}")


def _why_no_triton_kernels(option: str) -> str | None:
    """The reason why plain torch computes, or None; every backend on CUDA also needs Triton."""
    if envs.VLLM_KERNELS == "plain":
        return f"VLLM_KERNELS=plain computes in plain torch; unset one of the two ({option})"
    problem = why_no_triton()
    return None if problem is None else f"{problem}; fix that, or leave {option} unset"


def _why_no_flashinfer(
    dtype: torch.dtype, head_size: int, has_sinks: bool, has_chunks: bool, shares_values: bool
) -> str | None:
    from vllm.ops.cuda.flashinfer_attention import HEAD_SIZES

    if dtype is torch.float32:
        return "FlashInfer does not take dtype='float32'; use TRITON_ATTN, or dtype='bfloat16'"
    if shares_values:
        return "it does not support latent attention, which this model has; use TRITON_ATTN"
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return (
            f"it supports heads of {sizes} elements, this model has heads of {head_size}; "
            "use TRITON_ATTN"
        )
    if has_sinks:
        return "FlashInfer does not support sinks, which this model has; use TRITON_ATTN"
    if has_chunks:
        return "FlashInfer does not support this model's attention inside chunks; use TRITON_ATTN"
    return None


def _why_no_fla(dtype: torch.dtype) -> str | None:
    from vllm.ops.cuda import fla_recurrent

    if dtype is torch.float32:
        return (
            "flash-linear-attention's chunks are for 16-bit models, not for dtype='float32'; "
            "use TRITON, or dtype='bfloat16'"
        )
    problem = fla_recurrent.why_unavailable()
    return None if problem is None else f"{problem}; use TRITON, or leave it unset"
