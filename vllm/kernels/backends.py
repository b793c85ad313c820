"""Kernels that an option names and that cannot serve: an error when the engine starts."""

from __future__ import annotations

import torch

from vllm import envs
from vllm.kernels import why_no_triton
from vllm.platforms.interface import AskedBackend


def check_attention_backend(
    asked: AskedBackend | None,
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    has_sinks: bool,
) -> None:
    """Raise ValueError when layers of this kind cannot attend through the backend asked for.

    That the device has it is known (``Platform.choose_attention_backend``).
    """
    if asked is None or device_type != "cuda":
        return
    problem = _why_no_triton_kernels(asked.option)
    if problem is None and asked.name == "FLASHINFER":
        problem = _why_no_flashinfer(dtype, head_size, has_sinks)
    if problem is not None:
        raise ValueError(f"{asked.option}={asked.name!r} cannot be used: {problem}")


def check_delta_rule_backend(device_type: str, dtype: torch.dtype) -> None:
    """Raise ValueError when the recurrent layers cannot use what VLLM_GDN_BACKEND names."""
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
    """Why plain torch computes; all that the options name on CUDA needs Triton's kernels too."""
    if envs.VLLM_KERNELS == "plain":
        return f"VLLM_KERNELS=plain computes in plain torch; unset one of the two ({option})"
    problem = why_no_triton()
    return None if problem is None else f"{problem}; mend that, or leave {option} unset"


def _why_no_flashinfer(dtype: torch.dtype, head_size: int, has_sinks: bool) -> str | None:
    from vllm.kernels.flashinfer_attention import HEAD_SIZES

    if dtype is torch.float32:
        return "FlashInfer does not take dtype='float32'; use TRITON_ATTN, or dtype='bfloat16'"
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return (
            f"it takes heads of {sizes} elements, this model has heads of {head_size}; "
            "use TRITON_ATTN"
        )
    if has_sinks:
        return "FlashInfer takes no sinks, this model has some; use TRITON_ATTN"
    return None


def _why_no_fla(dtype: torch.dtype) -> str | None:
    from vllm.kernels import fla_recurrent

    if dtype is torch.float32:
        return (
            "flash-linear-attention's chunks are for 16-bit models, not for dtype='float32'; "
            "use TRITON, or dtype='bfloat16'"
        )
    problem = fla_recurrent.why_unavailable()
    return None if problem is None else f"{problem}; use TRITON, or leave it unset"
