"""The same tokens give the same bits: whole, in chunks, in company, after a resumption."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels
from kernel_steps import (
    AttentionRun,
    RecurrentLayer,
    RecurrentRun,
    Schedule,
    in_chunks,
    in_company,
    some_sinks,
)

LENGTHS = (150, 37, 90)
"""Tokens of the request that is looked at, then of those that run beside it."""

SCHEDULES: dict[str, Schedule] = {
    **{f"chunks of {size}": in_chunks(LENGTHS[0], size) for size in (1, 7, 16, 64, 100, 150)},
    **{f"in company {seed}": in_company(LENGTHS, seed) for seed in range(3)},
}


ON_TWO_THREADS = ("chunks of 64",)
"""Few: two threads that wait for each other at every operation are slow on a busy machine."""


def _check(run: Callable[[Schedule], tuple[torch.Tensor, ...]]) -> None:
    """Every schedule, and some on two threads, gives what the whole prompt alone gives."""
    expected = run(in_chunks(LENGTHS[0], LENGTHS[0]))
    for threads, names in ((1, tuple(SCHEDULES)), (2, ON_TWO_THREADS)):
        torch.set_num_threads(threads)
        for name in names:
            for wanted, tensor in zip(expected, run(SCHEDULES[name]), strict=True):
                assert torch.equal(tensor, wanted), f"{name}, {threads} threads"
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "pages", "soft_cap", "chunk"),
    [
        (8, 2, 64, None, 5, None, None),
        (3, 1, 24, 17, 1, None, None),
        (4, 4, 80, 100, 2, None, None),
        (8, 2, 64, None, 5, 1.5, None),
        (3, 1, 24, 17, 1, 0.2, None),
        (4, 2, 40, None, 1, None, 24),
        (6, 2, 64, None, 3, None, 100),
    ],
)
def test_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int | None,
    pages: int,
    soft_cap: float | None,
    chunk: int | None,
) -> None:
    """With a soft cap and sinks, and without both."""
    sinks = None if soft_cap is None else some_sinks(heads)
    requests = []
    for tokens in LENGTHS:
        kv = torch.randn(2, tokens, kv_heads, head_size).to(dtype)
        requests.append((torch.randn(tokens, heads, head_size).to(dtype), kv[0], kv[1]))

    def run(schedule: Schedule) -> tuple[torch.Tensor, ...]:
        seed = len(schedule)  # other blocks each time
        run = AttentionRun(kernels, requests, pages, window, seed, soft_cap, sinks, chunk)
        return (run.run(schedule)[0],)

    _check(run)


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "dk", "dv"), [(2, 4, 32, 32), (1, 3, 24, 40), (1, 2, 33, 192)], ids=str
)
def test_recurrent_layer(
    kernels: Kernels, dtype: torch.dtype, k_heads: int, v_heads: int, dk: int, dv: int
) -> None:
    layer = RecurrentLayer(dtype, k_heads, v_heads, dk, dv)
    requests = [layer.inputs(tokens) for tokens in LENGTHS]
    snapshots = {0: {16: 7, 64: 8, 149: 9}, 2: {48: 10}}

    def run(schedule: Schedule) -> tuple[torch.Tensor, ...]:
        pool = layer.new_pool(11)
        out = RecurrentRun(kernels, layer, requests, pool, snapshots).run(schedule)[0]
        kept = [part for n, block in snapshots[0].items() for part in state(pool, block, n)]
        return out, *state(pool, 1, LENGTHS[0]), *kept

    def state(pool: torch.Tensor, block: int, num_tokens: int) -> list[torch.Tensor]:
        return [part.clone() for part in layer.kept(pool, kernels, block, num_tokens)]

    _check(run)
    out, *final = run(in_chunks(LENGTHS[0], 100))
    pool = layer.new_pool(11)
    RecurrentRun(kernels, layer, requests, pool, snapshots).run(in_chunks(LENGTHS[0], 150))
    for tokens, block in snapshots[0].items():
        resumed = RecurrentRun(kernels, layer, requests, pool, resume={0: (tokens, block)})
        assert torch.equal(resumed.run(in_chunks(150 - tokens, 31))[0], out[tokens:])
        own = state(pool, 1, LENGTHS[0])
        assert all(map(torch.equal, own, final[: len(own)]))


def row_operations(
    kernels: Kernels, dtype: torch.dtype, rows: int
) -> dict[str, Callable[[slice], torch.Tensor]]:
    """Operations on a slice of the same ``rows`` rows."""
    x, residual = torch.randn(2, rows, 72).to(dtype)
    weight, norm = torch.randn(40, 72).to(dtype), torch.randn(72).to(dtype)
    narrow = torch.randn(1, 72).to(dtype)
    bias = torch.randn(40).to(dtype)
    heads, gate = torch.randn(2, rows, 3, 24).to(dtype)
    wide = torch.randn(rows, 1030).to(dtype)
    positions = torch.randint(0, 64, (rows,))
    cos_sin = torch.randn(64, 24)

    def add_rms_norm(own: slice) -> torch.Tensor:
        stream = residual[own].clone()
        return torch.cat((kernels.add_rms_norm(x[own], stream, norm, 1e-6), stream), -1)

    def rotary(own: slice) -> torch.Tensor:
        query, key = heads[own].clone(), gate[own].clone()
        kernels.rotary_embedding(positions[own], query, key, cos_sin, False)
        return torch.cat((query, key), -1)

    def norm_and_rotate(own: slice) -> torch.Tensor:
        weights = (norm[:24], norm[24:48])
        inputs = (positions[own], heads[own], gate[own])
        return torch.cat(kernels.norm_and_rotate(*inputs, weights, 1e-6, 1.0, cos_sin, False), -1)

    return {
        "linear": lambda own: kernels.linear(x[own], weight),
        "linear with bias": lambda own: kernels.linear(x[own], weight, bias),
        "linear to one column": lambda own: kernels.linear(x[own], narrow),
        "rms_norm": lambda own: kernels.rms_norm(wide[own], None, 1e-6),
        "rms_norm of heads": lambda own: kernels.rms_norm(heads[own], norm[:24], 1e-6, 1.0),
        "add_rms_norm": add_rms_norm,
        "gated_rms_norm": lambda own: kernels.gated_rms_norm(
            heads[own], gate[own], norm[:24], 1e-6
        ),
        "silu_and_mul": lambda own: kernels.silu_and_mul(wide[own]),
        "sigmoid_gate": lambda own: kernels.sigmoid_gate(heads[own], gate[own]),
        "rotary": rotary,
        "norm and rotary": norm_and_rotate,
    }


def test_row_operations(kernels: Kernels, dtype: torch.dtype) -> None:
    rows = 200
    operations = row_operations(kernels, dtype, rows)
    whole = {name: operation(slice(0, rows)) for name, operation in operations.items()}
    for threads, sizes in ((1, (1, 7, 16, 64, 100)), (2, (100, 200))):
        torch.set_num_threads(threads)
        for name, operation in operations.items():
            for size in sizes:
                for start in range(0, rows, size):
                    own = slice(start, min(start + size, rows))
                    assert torch.equal(operation(own), whole[name][own]), f"{name}, {size} rows"


@pytest.mark.parametrize(("width", "columns"), [(2048, 512), (1024, 16), (64, 1), (8, 2)])
def test_linear_of_few_and_many_rows(
    kernels: Kernels, dtype: torch.dtype, width: int, columns: int
) -> None:
    x, weight = torch.randn(560, width).to(dtype), torch.randn(columns, width).to(dtype)
    whole = kernels.linear(x, weight)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 15, 17, 129, 513):
            for start in (0, 41):
                part = kernels.linear(x[start : start + rows], weight)
                assert torch.equal(part, whole[start : start + rows]), f"{rows} rows"
