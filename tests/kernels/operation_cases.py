"""Arguments for every operation: odd sizes, strides, several requests, nothing at all.

Here are those of the first operations; a module ``cases_*.py`` beside this one has more.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernel_pools import AttentionPool, make_layout, make_plan, strided

import vllm.ops
from vllm.ops.linear import make_panels
from vllm.ops.operation import Operation, all_operations


class Case(NamedTuple):
    """One call."""

    args: tuple[Any, ...]
    tolerance: float
    """Share of the largest written value of a tensor, beside one unit in the last place."""
    compared: tuple[str, ...] = ("out",)
    """Arguments that are compared afterwards; how others lie is the implementations' affair."""


def every_operation() -> dict[str, Operation[Any]]:
    """The operations of all modules of ``vllm.ops``, by name."""
    for module in pkgutil.iter_modules(vllm.ops.__path__, "vllm.ops."):
        if not module.ispkg and not module.name.startswith("vllm.ops._"):  # but for libraries
            importlib.import_module(module.name)
    return all_operations()


MakeCases = Callable[[torch.dtype], Iterator[Case]]
CASES: dict[str, MakeCases] = {}


def cases(make: MakeCases) -> MakeCases:
    """Decorator: cases of the operation of that name."""
    CASES[make.__name__] = make
    return make


def _nan(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _rows(dtype: torch.dtype, heads: bool = False) -> Iterator[torch.Tensor]:
    """Tensors [tokens, n] or [tokens, heads, n]."""
    for shape in ((0, 8), (1, 1), (3, 33), (17, 100), (5, 256)):
        full = (shape[0], 3, shape[1]) if heads else shape
        x = torch.randn(full).to(dtype)
        yield x
        yield strided(x)


def _norm_tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 2**-8


@cases
def rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for heads in (False, True):
        for x in _rows(dtype, heads):
            weight = torch.randn(x.shape[-1]).to(dtype)
            for given, offset in ((weight, 0.0), (weight, 1.0), (None, 0.0)):
                yield Case((x, given, 1e-6, offset, _nan(x.shape, dtype)), _norm_tolerance(dtype))


@cases
def add_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for x in _rows(dtype):
        for residual in (torch.randn(x.shape).to(dtype), strided(torch.randn(x.shape).to(dtype))):
            weight = torch.randn(x.shape[-1]).to(dtype)
            args = (x, residual, weight, 1e-6, 0.0, _nan(x.shape, dtype))
            yield Case(args, _norm_tolerance(dtype), ("residual", "out"))


@cases
def gated_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for gate in _rows(dtype, heads=True):
        x, weight = torch.randn(gate.shape).to(dtype), torch.randn(gate.shape[-1]).to(dtype)
        yield Case((x, gate, weight, 1e-6, _nan(x.shape, dtype)), _norm_tolerance(dtype))


@cases
def silu_and_mul(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((0, 8), (1, 2), (3, 66), (17, 200)):
        x = torch.randn(shape).to(dtype)
        for given in (x, strided(x)):
            yield Case((given, _nan((shape[0], shape[1] // 2), dtype)), 1e-6)


@cases
def sigmoid_gate(dtype: torch.dtype) -> Iterator[Case]:
    for x in _rows(dtype, heads=True):
        gate = strided(torch.randn(x.shape).to(dtype))
        yield Case((x, gate, _nan(x.shape, dtype)), 1e-6)


@cases
def rotary_embedding(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, rotary_dim, size in ((0, 8, 8), (1, 2, 5), (7, 24, 33), (5, 64, 64)):
        positions, cos_sin = torch.randint(50, (tokens,)), torch.randn(50, rotary_dim)
        for interleaved in (False, True):
            query = strided(torch.randn(tokens, 4, size).to(dtype))
            key = torch.randn(tokens, 2, size).to(dtype)
            args = (positions, query, key, cos_sin, interleaved)
            yield Case(args, 2e-6, ("query", "key"))


@cases
def norm_and_rotate(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, rotary_dim, size in ((0, 8, 8), (1, 2, 5), (7, 24, 33), (5, 64, 64)):
        positions, cos_sin = torch.randint(50, (tokens,)), torch.randn(50, rotary_dim)
        for interleaved, offset in ((False, 0.0), (True, 1.0), (False, 1.0), (True, 0.0)):
            query = strided(torch.randn(tokens, 4, size).to(dtype))
            key = torch.randn(tokens, 2, size).to(dtype)
            weights = torch.randn(2, size).to(dtype)
            outs = [torch.full(x.shape, math.nan, dtype=dtype) for x in (query, key)]
            args = (positions, query, key, *weights, 1e-6, offset, cos_sin, interleaved, *outs)
            tolerance = 2e-6 if dtype is torch.float32 else 2**-8
            yield Case(args, tolerance, ("query_out", "key_out"))


@cases
def write_kv(dtype: torch.dtype) -> Iterator[Case]:
    sizes = ((0, 8, 8), (9, 24, 24), (9, 33, 7), (5, 40, 0))
    for (tokens, key_size, value_size), heads_first in product(sizes, (False, True)):
        pool = AttentionPool(
            dtype, 2, key_size, 3, num_blocks=4, value_size=value_size, heads_first=heads_first
        )
        key = strided(torch.randn(tokens, 2, key_size).to(dtype))
        value = torch.randn(tokens, 2, value_size).to(dtype)
        slots = torch.randperm(4 * 48)[:tokens]
        slots[::4] = -1
        yield Case((key, value, slots, pool.kv_cache), 0.0, ("kv_cache",))


def _attention_of_heads(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    shapes = [
        (4, 2, 24, 24, None, False),
        (4, 2, 24, 24, None, True),
        (3, 1, 33, 33, None, False),
        (4, 4, 64, 40, None, False),
        (4, 4, 64, 40, None, True),
        (6, 1, 72, 64, 0, False),
        (5, 1, 33, 25, 0, False),
    ]
    for heads, kv_heads, key_size, value_size, shared_from, heads_first in shapes:
        own = value_size if shared_from is None else 0
        pool = AttentionPool(
            dtype, kv_heads, key_size, 2, num_blocks=30, value_size=own, heads_first=heads_first
        )
        pool.kv_cache.copy_(torch.randn(pool.kv_cache.shape))
        table = (torch.randperm(29)[:28] + 1).to(torch.int32).view(4, 7)
        layout = make_layout([1, 20, 1, 130], [0, 37, 200, 50])
        query = strided(torch.randn(152, heads, key_size).to(dtype), padding=8)
        sinks = torch.randn(heads).to(dtype)
        offset = key_size if shared_from is None else shared_from
        for reach, cap, given in (
            ((None, None), None, None),
            ((17, None), None, sinks),
            ((None, None), 3.0, sinks),
            ((None, 19), None, None),
        ):
            out = _nan((152, heads, value_size), dtype)
            args = (query, pool.kv_cache, table, layout, key_size**-0.5, offset, *reach, cap, given)
            yield Case((*args, out), tolerance)


@cases
def paged_attention(dtype: torch.dtype) -> Iterator[Case]:
    yield from _attention_of_heads(dtype)
    yield from _latent_attention(dtype)


def _latent_attention(dtype: torch.dtype) -> Iterator[Case]:
    """One key of 576 elements a token, whose first 512 are its value, and odd ones."""
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    for heads, key_size, value_size in ((3, 576, 512), (7, 45, 33)):
        pool = AttentionPool(dtype, 1, key_size, 2, num_blocks=14, value_size=0)
        pool.kv_cache[1:] = torch.randn(pool.kv_cache[1:].shape).to(dtype)
        table = (torch.randperm(13) + 1)[:10].to(torch.int32).view(2, 5)
        layout = make_layout([1, 9], [40, 137])
        for blocks, seq_len in zip(table, layout.seq_lens.tolist(), strict=True):
            pool.kv_cache.flatten(1, 2)[blocks[seq_len // 32], seq_len % 32 :] = torch.nan
            pool.kv_cache[blocks[seq_len // 32 + 1 :]] = torch.nan
        query = strided(torch.randn(10, heads, key_size).to(dtype), padding=8)
        out = _nan((10, heads, value_size), dtype)
        args = (query, pool.kv_cache, table, layout, key_size**-0.5, 0, None, None, None, None)
        yield Case((*args, out), tolerance)


def _recurrent_step(blocks: int) -> tuple[Any, Any]:
    """Several requests, new and not, one without tokens; some states are kept on the way."""
    layout = make_layout([1, 40, 0, 17], [0, 0, 9, 0])
    plan = make_plan([1, 2, 3, 4], [False] * 4, [[], [(16, 5), (33, 6)], [], [(17, 7)]])
    assert blocks > 7
    return layout, plan


@cases
def causal_conv1d(dtype: torch.dtype) -> Iterator[Case]:
    for channels, width in ((8, 4), (33, 2), (200, 3), (130, 5)):
        layout, plan = _recurrent_step(8)
        x = strided(torch.randn(58, channels).to(dtype))
        weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
        state = torch.zeros(8, width - 1, channels).to(dtype)
        for given, applies_silu in ((None, True), (bias, True), (bias, False)):
            args = (x, weight, given, applies_silu, layout, plan, state)
            args = (*args, _nan((58, channels), dtype))
            yield Case(args, 2e-6, ("state_cache", "out"))


@cases
def gated_delta_rule(dtype: torch.dtype) -> Iterator[Case]:
    """Pending tokens are one implementation's: the plain body keeps none, so neither do these."""
    if dtype is not torch.float32:
        return
    for k_heads, v_heads, dk, dv, beta_scale in (
        (1, 1, 8, 8, 1.0),
        (2, 4, 33, 20, 2.0),
        (1, 3, 64, 64, 1.0),
    ):
        layout, plan = _recurrent_step(8)
        qkv = strided(torch.randn(58, 2 * k_heads * dk + v_heads * dv).to(dtype))
        a, b = torch.randn(2, 58, v_heads).to(dtype)
        a_log, dt_bias = torch.randn(2, v_heads)
        state = torch.zeros(8, v_heads, dk, dv)
        args = (qkv, strided(a), b, a_log, dt_bias, k_heads, beta_scale)
        args = (*args, layout, plan, state, [], _nan((58, v_heads, dv), dtype))
        yield Case(args, 1e-5)


def _row_cache(dtype: torch.dtype) -> torch.Tensor:
    return strided(torch.randn(5, 7, 3, 33).to(dtype))


@cases
def capture_rows(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (0, 1, 20):
        slots = torch.randperm(35)[:tokens]
        slots[::3] = -1
        hidden, residual = (strided(torch.randn(tokens, 33).to(dtype)) for _ in range(2))
        for given in (None, residual):
            yield Case((hidden, given, slots, 1, _row_cache(dtype)), 0.0, ("row_cache",))


@cases
def find_bad_cells(dtype: torch.dtype) -> Iterator[Case]:
    for num_rows, width in ((0, 8), (1, 1), (20, 33), (3, 5000)):
        for row, column, value in ((-1, 2, math.nan), (0, 1, math.inf), (-1, 0, -math.inf)):
            rows = strided(torch.randn(num_rows, 3, width).to(dtype))
            for bad in ((), (value,), (value, 0.0)):
                if num_rows and bad:
                    rows[row, column, -1] = bad[0]
                if num_rows and len(bad) > 1:
                    rows[num_rows // 2, 2] = 0.0
                report = torch.full((2,), -7)
                yield Case((rows.clone(), report), 0.0, ("report",))
                yield Case((rows, report), 0.0, ("report",))


@cases
def gather_rows(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (0, 1, 20):
        cache = _row_cache(dtype)
        cache[2, 3, 1] = 0.0
        cache[3, 3, 2, 5] = float("inf")
        slots, report = torch.randperm(35)[:tokens], torch.full((2,), -7)
        args = (cache, slots, torch.zeros(tokens, 3, 33, dtype=dtype), report)
        yield Case(args, 0.0, ("out", "report"))


@cases
def copy_blocks(dtype: torch.dtype) -> Iterator[Case]:
    for count in (0, 1, 4):
        pool = torch.randint(-100, 100, (9, 640), dtype=torch.int8)
        order = torch.randperm(9)
        yield Case((order[:count].clone(), order[count : 2 * count].clone(), pool), 0.0, ("pool",))


@cases
def linear(dtype: torch.dtype) -> Iterator[Case]:
    for rows, terms, columns in ((0, 8, 8), (1, 1, 1), (5, 33, 70), (70, 512, 65), (3, 1030, 64)):
        x = strided(torch.randn(rows, terms).to(dtype))
        weight = (torch.randn(columns, terms) / terms**0.5).to(dtype)
        bias = torch.randn(columns).to(dtype)
        for given in (weight, strided(weight), make_panels(weight)):
            for added in (None, bias):
                yield Case((x, given, added, _nan((rows, columns), dtype)), 2e-6)


@cases
def linear_by_head(dtype: torch.dtype) -> Iterator[Case]:
    for rows, heads, terms, columns in ((0, 2, 8, 8), (1, 5, 33, 7), (70, 3, 24, 130)):
        x = strided(torch.randn(rows, heads, terms).to(dtype))
        weight = (torch.randn(heads, columns, terms) / terms**0.5).to(dtype)
        for given in (weight, make_panels(weight)):
            yield Case((x, given, strided(_nan((rows, heads, columns), dtype))), 2e-6)


@cases
def write_panels(dtype: torch.dtype) -> Iterator[Case]:
    for rows, row_bytes in ((1, 1), (3, 64), (64, 66), (130, 1030), (70, 4096), (200, 127)):
        whole = torch.randint(256, (rows, row_bytes + 70), dtype=torch.uint8)
        for given in (whole[:, 3 : row_bytes + 3], whole[:, :row_bytes].contiguous()):
            for unit_bytes in (2, 4):
                shape = (-(-rows // 64), -(-row_bytes // unit_bytes), 64, unit_bytes)
                panels = torch.full(shape, 7, dtype=torch.uint8)
                yield Case((given, panels), 0.0, ("panels",))


@cases
def panel_embedding(dtype: torch.dtype) -> Iterator[Case]:
    for count, columns, terms in ((0, 8, 8), (3, 1, 1), (9, 70, 33), (200, 128, 64)):
        panels = make_panels(torch.randn(columns, terms).to(dtype))
        ids = torch.randint(columns, (count,))
        yield Case((ids, panels, columns, _nan((count, terms), dtype)), 0.0)


@cases
def most_likely(dtype: torch.dtype) -> Iterator[Case]:
    for rows, size in ((0, 5), (1, 1), (4, 1000)):
        logits = torch.randn(rows, size).to(dtype)
        logits[:, size // 2 :] = logits[:, : size - size // 2]  # equals
        for given in (logits, strided(logits)):
            yield Case((given, torch.full((rows,), -7)), 0.0)


def every_case() -> dict[str, MakeCases]:
    """Cases of all operations, by name."""
    for path in Path(__file__).parent.glob("cases_*.py"):
        importlib.import_module(path.stem)
    return CASES
