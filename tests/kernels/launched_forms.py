"""Launches the CUDA kernels in the forms that models bring about, over tensors of no values.

Whoever imports this decides what a launch does: ``compile_kernels.py`` compiles. A form is what
Triton compiles anew: a kernel with its constants, the types and the alignment of its arguments.
The launchers choose it from the shapes below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from kernel_calls import Kernels, triton_kernels
from kernel_pools import make_layout, make_plan

from vllm.ops.channel_delta_rule import channel_delta_rule
from vllm.ops.cuda import triton_attention, triton_recurrent, triton_recurrent_conv
from vllm.ops.layout import SequenceLayout
from vllm.ops.linear_recurrence import gated_linear_recurrence
from vllm.ops.mlstm import mlstm
from vllm.ops.selective_scan import selective_scan
from vllm.ops.state_space import state_space_scan
from vllm.ops.wkv import wkv
from vllm.v1.worker import profile_run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class AttentionCase(NamedTuple):
    """A kind of attention layer."""

    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    chunk: int | None = None
    latent_values: int | None = None
    """Elements of values that begin their keys (latent attention)."""


QWEN_ATTENTION = AttentionCase(BF16, 256, 16, 4)
ATTENTION = (
    *(AttentionCase(BF16, size, 32, 8) for size in (64, 80, 96, 128)),
    QWEN_ATTENTION,
    AttentionCase(BF16, 512, 16, 4),
    AttentionCase(FP16, 128, 32, 8),
    AttentionCase(FP16, 256, 16, 4),
    *(AttentionCase(FP32, size, 32, 8) for size in (64, 128)),
    AttentionCase(FP32, 256, 16, 4),
    AttentionCase(BF16, 128, 32, 8, window=4096),
    AttentionCase(BF16, 256, 8, 4, window=4096, soft_cap=50.0),  # Gemma 2
    AttentionCase(BF16, 256, 8, 4, soft_cap=50.0),
    AttentionCase(BF16, 64, 64, 8, window=128, has_sinks=True),  # gpt-oss
    AttentionCase(BF16, 64, 64, 8, has_sinks=True),
    AttentionCase(BF16, 128, 32, 8, soft_cap=30.0, has_sinks=True),
    AttentionCase(BF16, 128, 40, 8, chunk=8192),  # Llama 4
    *(AttentionCase(dtype, 576, 16, 1, latent_values=512) for dtype in (BF16, FP16, FP32)),
    AttentionCase(BF16, 288, 40, 1, latent_values=256),  # MiniCPM3
)

ATTENTION_STEPS = (
    make_layout([1] * 64, [1000] * 64),  # few rows, keys of one part
    make_layout([1], [100_000]),  # few rows, and parts side by side
    make_layout([16_384], [0]),  # many rows
    make_layout([300], [30_000]),  # many rows, and parts side by side
)


class DeltaCase(NamedTuple):
    """A kind of recurrent layer."""

    dtype: torch.dtype
    k_heads: int
    v_heads: int
    dk: int = 128
    dv: int = 128


DELTA = (
    DeltaCase(BF16, 16, 32),
    DeltaCase(BF16, 16, 16),
    DeltaCase(FP16, 16, 32),
    DeltaCase(FP32, 16, 32),
)


RECURRENT_STEPS = ([1] * 64, [7], [16_384], [300] * 40)
"""Lengths of the requests: decoding, less than a chunk, few requests and many with chunks."""


def launch_all() -> None:
    """Every kernel in every form."""
    launch_tiles()
    kernels = triton_kernels()
    for dtype in (BF16, FP16, FP32):
        for hidden in (1024, 4096, 5120):
            _hidden_rows(kernels, dtype, hidden)
        for head_size, heads, kv_heads in ((64, 32, 8), (80, 32, 32), (128, 32, 8), (256, 16, 4)):
            _heads(kernels, dtype, head_size, heads, kv_heads)
        _experts(kernels, dtype, 40, 128, 2048, 768)  # Qwen3-MoE
        _experts(kernels, dtype, 40, 32, 2880, 2880, has_bias=True)  # gpt-oss
        _other_recurrences(kernels, dtype, 2)
    _copies(kernels, 1)


def launch_tiles() -> None:
    """The kernels that keep tiles in shared memory, and what runs around them."""
    kernels = triton_kernels()
    for case in ATTENTION:
        for layout in ATTENTION_STEPS:
            _attention(kernels, case, layout)
    for delta in DELTA:
        for lengths in RECURRENT_STEPS:
            for has_bias in (False, True):
                _recurrent_layer(kernels, delta, lengths, has_bias)


def launch_one_model() -> None:
    """Every kernel, in the forms of Qwen3.5 whose steps have many rows."""
    kernels = triton_kernels()
    _attention(kernels, QWEN_ATTENTION, ATTENTION_STEPS[-1])
    _recurrent_layer(kernels, DELTA[0], RECURRENT_STEPS[-1])
    _hidden_rows(kernels, BF16, 1024)
    _other_recurrences(kernels, BF16, 2)
    case = QWEN_ATTENTION
    _heads(kernels, BF16, case.head_size, case.heads, case.kv_heads)
    _experts(kernels, BF16, 40, 128, 2048, 768)
    _copies(kernels, 1)


def launch_alike() -> None:
    """One kind of layer of each sort, for few programs and for many."""
    for layout in ATTENTION_STEPS:
        _attention(triton_kernels(), QWEN_ATTENTION, layout)
    for lengths in RECURRENT_STEPS:
        _recurrent_layer(triton_kernels(), DELTA[0], lengths)


def launch_reordered() -> None:
    """Short steps, each time with a choice by which a row would be summed in another order."""
    shape_of = triton_attention._tile_shape

    def of_fewer_keys(*args: Any) -> Any:
        shape = shape_of(*args)
        return shape._replace(keys=shape.keys // 2)

    def with_divided_keys(*args: Any) -> Any:
        """Each four warps do 64 rows: more of them divide the keys."""
        return shape_of(*args)._replace(num_warps=8)

    for shape in (of_fewer_keys, with_divided_keys):
        with mock.patch.object(triton_attention, "_tile_shape", shape):
            _attention(triton_kernels(), QWEN_ATTENTION, ATTENTION_STEPS[0])
    with mock.patch.object(triton_recurrent, "_STEP_COLUMNS", 2 * triton_recurrent._STEP_COLUMNS):
        _recurrent_layer(triton_kernels(), DELTA[0], [1] * 64)


def launch_faults() -> None:
    """Launch what limits have to notice: rows that begin anywhere, and tiles twice as large."""
    kernels, hidden = triton_kernels(), 1024
    odd = torch.empty(8, hidden + 1, dtype=BF16)[:, :hidden]
    kernels.rms_norm(odd, torch.empty(hidden, dtype=BF16), 1e-6)
    cache = torch.empty(4, 5, 16, 8, 257, dtype=BF16)[..., :256]
    _attention(kernels, AttentionCase(BF16, 128, 32, 8), ATTENTION_STEPS[2], cache)
    with mock.patch.object(triton_recurrent, "_STEP_COLUMNS", 2 * triton_recurrent._STEP_COLUMNS):
        _recurrent_layer(kernels, DELTA[0], [1] * 64)
    tokens = 2 * triton_recurrent_conv._TILE_TOKENS
    with mock.patch.object(triton_recurrent_conv, "_TILE_TOKENS", tokens):
        _recurrent_layer(kernels, DELTA[0], [300] * 40)


def launch_warm_up() -> None:
    """Launch what an engine does before its first request, in the steps of its profile run."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=131_072),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
    )
    steps = [([tokens], before) for tokens, before in profile_run.warm_up_steps(config)]
    steps += [(profile_run._fullest_step(config), 0), ([1] * 256, 0)]
    for lengths, context in steps:
        _layers_of_a_model(lengths, context)
        step = profile_run._make_step((), lengths, [None] * len(lengths), context)
        _copies(triton_kernels(), len(step.block_copies))


def launch_workloads() -> None:
    """Steps that requests bring about: prompts, chunks of them, hits, decodes, mixtures."""
    alone = [[tokens] for tokens in (1, 2, 7, 17, 64, 65, 200, 511, 2048, 8192)]
    together = [[1] * 3, [1] * 200, [512] * 16, [40] * 64, [1000] * 8, [700, 1, 1, 1], [5, 300]]
    for lengths in alone + together:
        for context in (0, 5, 64, 1000, 2047, 2048, 6000, 30_000, 120_000):
            _layers_of_a_model(lengths, context)
    for count in (1, 2, 7, 100):
        _copies(triton_kernels(), count)


def _layers_of_a_model(lengths: Sequence[int], context: int) -> None:
    kernels, contexts = triton_kernels(), [context] * len(lengths)
    _attention(kernels, QWEN_ATTENTION, make_layout(lengths, contexts))
    _recurrent_layer(kernels, DELTA[0], lengths)


def launch_many_sizes() -> None:
    """One model, steps of many sizes. Six heads: sizes of tensors are then no multiples of 4."""
    kernels = triton_kernels()
    attention, delta = AttentionCase(BF16, 64, 6, 2), DeltaCase(BF16, 4, 8, 64, 64)
    for count in (1, 2, 3, 5, 8, 64, 65, 257):
        for context in (7, 1000, 3000, 9000, 100_001):
            _attention(kernels, attention, make_layout([1] * count, [context] * count))
        for length in (2, 3, 17, 33, 100, 301):
            _attention(kernels, attention, make_layout([length] * count, [9000] * count))
            _recurrent_layer(kernels, delta, [length] * count)
        _recurrent_layer(kernels, delta, [1] * count)
        _rows_of_a_step(kernels, count)
        _experts(kernels, BF16, count, 8, 384, 128, both=False)
        _other_recurrences(kernels, BF16, count)
        _copies(kernels, count)


def _attention(
    kernels: Kernels,
    case: AttentionCase,
    layout: SequenceLayout,
    cache: torch.Tensor | None = None,
) -> None:
    values = case.latent_values
    content = 2 * case.head_size if values is None else case.head_size
    if cache is None:
        cache = torch.empty(4, 5, 16, case.kv_heads, content, dtype=case.dtype)
    tokens = int(layout.query_start[-1])
    query = torch.empty(tokens, case.heads, case.head_size, dtype=case.dtype)
    table = torch.empty(layout.seq_lens.shape[0], 4, dtype=torch.int32)
    sinks = torch.empty(case.heads, dtype=case.dtype) if case.has_sinks else None
    scoring = (case.window, case.soft_cap, sinks)
    shared = {} if values is None else {"value_offset": 0, "value_size": values}
    kernels.paged_attention(query, cache, table, layout, 0.1, *scoring, chunk=case.chunk, **shared)


def _recurrent_layer(
    kernels: Kernels, case: DeltaCase, lengths: Sequence[int], has_bias: bool = False
) -> None:
    """As ``GatedDeltaNet.forward``."""
    dtype, tokens, count = case.dtype, sum(lengths), len(lengths)
    layout = make_layout(lengths, [0] * count)
    plan = make_plan([1] * count, [False] * count, [[] for _ in lengths])
    channels = 2 * case.k_heads * case.dk + case.v_heads * case.dv
    sizes = [channels, case.v_heads * case.dv, case.v_heads, case.v_heads]
    qkv, z, b, a = torch.empty(tokens, sum(sizes), dtype=dtype).split(sizes, dim=1)
    conv_cache = torch.empty(4, 3, channels, dtype=dtype)
    weight = torch.empty(channels, 4, dtype=dtype)
    bias = torch.empty(channels, dtype=dtype) if has_bias else None
    conv = kernels.causal_conv1d(qkv, weight, bias, conv_cache, layout, plan)
    states = torch.empty(4, case.v_heads, case.dk, case.dv)
    a_log, dt_bias = torch.empty(2, case.v_heads, dtype=dtype)
    out = kernels.gated_delta_rule(conv, a, b, a_log, dt_bias, states, case.k_heads, layout, plan)
    gate = z.unflatten(1, (case.v_heads, case.dv))
    kernels.gated_rms_norm(out, gate, torch.empty(case.dv, dtype=dtype), 1e-6)


def _other_recurrences(kernels: Kernels, dtype: torch.dtype, count: int) -> None:
    """Recurrent layers beside the gated delta rule, with the sizes of published models."""
    channels, layout = 4096, make_layout([3] * count, [0] * count)
    plan = make_plan([1] * count, [False] * count, [[] for _ in range(count)])
    x, step, gate, out = torch.empty(4, 3 * count, channels, dtype=dtype)
    projected = torch.empty(3 * count, 1, 288, dtype=dtype)
    rates, bias = torch.empty(16, channels), torch.empty(channels)
    kernels._run(
        selective_scan,
        *(x, step, projected[..., 256:272], projected[..., 272:], gate, rates, bias, bias),
        *(layout, plan, torch.empty(4, 16, channels), out),
    )
    kernels._run(
        gated_linear_recurrence, x, step, gate, bias, layout, plan, torch.empty(4, channels), out
    )
    cache = torch.empty(4, 3, channels)
    kernels._run(wkv, x, step, gate, bias, bias, layout, plan, cache, out)
    heads, head_dim, groups, state_size = 128, 64, 8, 128
    xbc = torch.empty(3 * count, heads * head_dim + 2 * groups * state_size, dtype=dtype)
    per_head, steps = torch.empty(heads), torch.empty(3 * count, heads, dtype=dtype)
    kernels._run(
        state_space_scan,
        *(xbc, steps, per_head, per_head, per_head, groups, 0.0, math.inf, layout, plan),
        torch.empty(4, heads, state_size, head_dim),
        [],
        torch.empty(3 * count, heads, head_dim, dtype=dtype),
    )
    heads, size = 32, 128
    qkv = torch.empty(3 * count, 3 * heads * size, dtype=dtype)
    log_decays = torch.empty(3 * count, heads * size)
    beta = torch.empty(3 * count, heads, dtype=dtype)
    cache = torch.empty(4, heads, size, size)
    rows = torch.empty(3 * count, heads, size, dtype=dtype)
    kernels._run(channel_delta_rule, qkv, log_decays, beta, layout, plan, cache, rows)
    heads, dk, dv = 8, 256, 512
    qkv = torch.empty(3 * count, heads * (2 * dk + dv), dtype=dtype)
    gates = torch.empty(3 * count, 2 * heads, dtype=dtype)
    caches = (torch.empty(4, heads, dk, dv), torch.empty(4, heads, dk), torch.empty(4, heads))
    rows = torch.empty(3 * count, heads, dv, dtype=dtype)
    kernels._run(mlstm, qkv, gates, 15.0, 1e-6, layout, plan, *caches, rows)


def _hidden_rows(kernels: Kernels, dtype: torch.dtype, hidden: int) -> None:
    """Norms, activation and captured rows of a layer."""
    x, residual = torch.empty(2, 8, hidden, dtype=dtype)
    weight, slots = torch.empty(hidden, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    for offset in (0.0, 1.0):
        kernels.rms_norm(x, weight, 1e-6, offset)
        kernels.add_rms_norm(x, residual, weight, 1e-6, offset)
    kernels.rms_norm(x, None, 1e-6)
    kernels.silu_and_mul(torch.empty(8, 6 * hidden, dtype=dtype))
    rows = torch.empty(4, 7, 3, hidden, dtype=dtype)
    for added in (None, residual):
        kernels.capture_rows(rows, slots, 1, x, added)
    kernels.find_bad_cells(rows[0])
    kernels.find_bad_cells(rows.flatten(0, 2)[:, None])


def _heads(kernels: Kernels, dtype: torch.dtype, head_size: int, heads: int, kv_heads: int) -> None:
    """Launch what is done to queries, keys and values before attention, and to its result."""
    sizes = [2 * heads, kv_heads, kv_heads]
    wide = torch.empty(8, sum(sizes), head_size, dtype=dtype)
    query_and_gate, key, value = wide.split(sizes, dim=1)
    query, gate = query_and_gate.unflatten(1, (heads, 2)).unbind(2)
    weight, slots = torch.empty(head_size, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    angles = torch.empty(64, head_size // 2)
    for offset, interleaved in product((0.0, 1.0), (False, True)):
        normed = kernels.rms_norm(query, weight, 1e-6, offset)
        norms = ((weight, weight), 1e-6, offset, angles, interleaved)
        kernels.norm_and_rotate(slots, query, key, *norms)
    for rotated, interleaved in product((query, normed), (False, True)):
        kernels.rotary_embedding(slots, rotated, key, angles, interleaved)
    cache = torch.empty(4, 5, 16, kv_heads, 2 * head_size, dtype=dtype)
    kernels.write_kv(key, value, cache, slots)
    kernels.sigmoid_gate(normed, gate)


def _rows_of_a_step(kernels: Kernels, tokens: int) -> None:
    """One call of each kernel that works row by row, but for norms."""
    hidden, slots = torch.empty(tokens, 384, dtype=BF16), torch.zeros(tokens, dtype=torch.int64)
    kernels.silu_and_mul(hidden)
    kernels.capture_rows(torch.empty(4, 7, 3, 384, dtype=BF16), slots, 1, hidden, None)
    kernels.find_bad_cells(hidden[:, None])
    query, key = hidden.unflatten(1, (6, 64)).split((4, 2), dim=1)
    kernels.rotary_embedding(slots, query, key, torch.empty(64, 64), interleaved=False)
    weights = (torch.empty(64, dtype=BF16), torch.empty(64, dtype=BF16))
    kernels.norm_and_rotate(slots, query, key, weights, 1e-6, 0.0, torch.empty(64, 64), False)
    cache = torch.empty(4, 5, 16, 2, 128, dtype=BF16)
    kernels.write_kv(key, key, cache, slots)


def _experts(
    kernels: Kernels,
    dtype: torch.dtype,
    pairs: int,
    num_experts: int,
    hidden: int,
    width: int,
    *,
    has_bias: bool = False,
    both: bool = True,
) -> None:
    """As ``Experts.forward``."""
    starts = torch.zeros(num_experts + 1, dtype=torch.int64)
    rows = torch.zeros(pairs, dtype=torch.int64)
    for chosen, terms, columns in ((rows, hidden, 2 * width), (None, width, hidden))[: 1 + both]:
        weight = torch.empty(num_experts, columns, terms, dtype=dtype)
        bias = torch.empty(num_experts, columns, dtype=dtype) if has_bias else None
        kernels.expert_linear(torch.empty(pairs, terms, dtype=dtype), chosen, starts, weight, bias)


def _copies(kernels: Kernels, count: int) -> None:
    """As the runner hands them over: both in one tensor."""
    sources, destinations = torch.zeros(2, count, dtype=torch.int64)
    kernels.copy_blocks(torch.empty(4, 2**21, dtype=torch.int8), sources, destinations)
