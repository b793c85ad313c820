"""Compile the CUDA kernels for Hopper where there is no card: nothing is launched.

The interpreter runs what the compiler may refuse, so this is run by itself, without it.
Prints the shared memory of each kernel in bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from kernel_pools import make_layout, make_plan
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm.kernels import get_kernels, triton_attention

HOPPER = GPUTarget("cuda", 90, 32)


class _NoDriver:
    """Names the target, and no device that could be launched on."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_instead_of_running() -> None:
    triton.runtime.driver.set_active(_NoDriver())
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        compiled = run(self, *args, **{**options, "warmup": True})
        print(compiled.metadata.name, compiled.metadata.shared, flush=True)
        return compiled

    JITFunction.run = compile_only


def _attention(
    dtype: torch.dtype,
    head_size: int,
    tokens: int,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    cache = torch.empty(4, 3, 16, 2, 2 * head_size, dtype=dtype)
    query = torch.empty(tokens, 8, head_size, dtype=dtype)
    table = torch.zeros(1, 4, dtype=torch.int32)
    layout = make_layout([tokens], [5000 if tokens == 1 else 0])
    triton_attention.paged_attention(query, cache, table, layout, 0.1, window, soft_cap, sinks)


def main() -> None:
    _compile_instead_of_running()
    for head_size in (64, 80, 128, 256):
        for tokens in (1, 1000):
            _attention(torch.bfloat16, head_size, tokens, None)
    _attention(torch.float16, 128, 1000, 100)
    _attention(torch.float32, 256, 1000, None)
    for tokens in (1, 1000):
        _attention(torch.bfloat16, 64, tokens, 128, sinks=torch.empty(8, dtype=torch.bfloat16))
        _attention(torch.bfloat16, 256, tokens, None, soft_cap=50.0, sinks=torch.empty(8))
    kernels, dtype = get_kernels("cuda"), torch.bfloat16
    x, weight = torch.empty(8, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    heads = torch.empty(8, 16, 256, dtype=dtype)
    slots = torch.zeros(8, dtype=torch.int64)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.rms_norm(heads, weight[:256], 1e-6, 1.0)
    kernels.add_rms_norm(x, x, weight, 1e-6)
    kernels.gated_rms_norm(heads, heads, weight[:256], 1e-6)
    kernels.silu_and_mul(x)
    kernels.sigmoid_gate(heads, heads)
    for interleaved in (False, True):
        kernels.rotary_embedding(slots, heads, heads[:, :2], torch.empty(9, 64), interleaved)
    kernels.write_kv(heads[:, :2], heads[:, :2], torch.empty(4, 3, 16, 2, 512, dtype=dtype), slots)
    kernels.capture_rows(torch.empty(4, 3, 2, 4096, dtype=dtype), slots, 1, x, x)
    kernels.copy_blocks(torch.empty(4, 65536, dtype=torch.int8), slots, slots)
    _recurrent_layer(dtype)


def _recurrent_layer(dtype: torch.dtype) -> None:
    kernels, tokens, channels = get_kernels("cuda"), 200, 8192
    layout, plan = make_layout([tokens], [0]), make_plan([1], [False], [[(30, 2), (64, 3)]])
    x, gates = torch.empty(tokens, channels, dtype=dtype), torch.empty(tokens, 32, dtype=dtype)
    kernels.causal_conv1d(
        x,
        torch.empty(channels, 4, dtype=dtype),
        None,
        torch.empty(4, 3, channels, dtype=dtype),
        layout,
        plan,
    )
    states, per_head = torch.empty(4, 32, 128, 128), torch.empty(32)
    kernels.gated_delta_rule(x, gates, gates, per_head, per_head, states, 16, layout, plan)


if __name__ == "__main__":
    main()
