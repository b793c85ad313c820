"""The Triton attention kernel over a poisoned pool, against naive float64 forms."""

from __future__ import annotations

import random

import kernel_reference as reference
import pytest
import torch
from kernel_calls import Kernels, one_other
from kernel_pools import make_layout, strided
from kernel_reference import HALF_ULP, assert_near
from kernel_steps import AttentionRun, Schedule, in_chunks, in_company, some_sinks
from triton_device import HAS_TRITON

from tests.grids import at_night, grid

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from vllm.ops import attention
from vllm.ops.cuda import cards, triton_attention

pytestmark = pytest.mark.usefixtures("card_or_interpreter")

Requests = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def triton_attention_kernels() -> Kernels:
    """The plain kernels with the attention under test."""
    return one_other(attention.paged_attention, triton_attention.paged_attention)


def _requests(
    lengths: list[int], heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> Requests:
    requests = []
    for tokens in lengths:
        query = strided(torch.randn(tokens, heads, head_size).to(dtype), padding=24)
        key, value = torch.randn(2, tokens, kv_heads, head_size).to(dtype)
        requests.append((query, key, value))
    return requests


def _assert_right(
    out: torch.Tensor,
    request: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> None:
    """``out``: of the last tokens of a request. The softmax weights are rounded to the dtype."""
    query, key, value = (x.double().cpu() for x in request)
    asked = query[len(query) - len(out) :]
    scale = 2.0 * query.shape[-1] ** -0.5
    sinks = None if sinks is None else sinks.double().cpu()
    expected, magnitude = (
        reference.attention(asked, key, v, scale, window, soft_cap, sinks, chunk)
        for v in (value, value.abs())
    )
    allowance = None
    if out.dtype is not torch.float32:
        allowance = HALF_ULP[out.dtype] * (magnitude + expected.abs())
    assert_near(out.cpu(), expected, out.dtype, allowance=allowance)


MIXED_STEP = [(1, 0), (1, 37), (20, 0), (33, 70), (1, 129), (5, 11)]
"""(tokens, context) of the requests of one step: decodes and prefills, with and without context."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "pages", "dtype"),
    [
        (1, 1, 8, None, 1, torch.float32),
        (3, 1, 24, 5, 2, torch.float16),
        (4, 4, 64, 17, 3, torch.bfloat16),
        (8, 2, 80, 100, 5, torch.bfloat16),
        (2, 1, 96, None, 3, torch.float16),
        (5, 1, 128, None, 9, torch.bfloat16),
        (8, 1, 256, None, 9, torch.bfloat16),
        (2, 1, 300, None, 4, torch.bfloat16),
        (4, 2, 256, 100, 4, torch.float32),
        (6, 3, 64, 1, 4, torch.float32),
        (70, 1, 16, None, 2, torch.bfloat16),  # more heads in a group than rows in a tile
    ],
)
def test_mixed_step(
    heads: int, kv_heads: int, head_size: int, window: int | None, pages: int, dtype: torch.dtype
) -> None:
    requests = _requests([sum(r) for r in MIXED_STEP], heads, kv_heads, head_size, dtype)
    run = AttentionRun(triton_attention_kernels(), requests, pages, window)
    for r, (_, context) in enumerate(MIXED_STEP):
        if context:
            run.write([(r, context)])
            run.computed[r] = context
    step = [(r, tokens) for r, (tokens, _) in enumerate(MIXED_STEP)]
    run.write(step)
    before = run.pool.pool.clone()
    out = run.attend(step)
    assert torch.equal(run.pool.pool, before)
    assert out.is_contiguous()
    for part, request in zip(out.split([n for _, n in step]), requests, strict=True):
        _assert_right(part, request, window)


@pytest.mark.parametrize(
    ("scoring", "programs", "window"),
    grid(
        [
            (1.5, torch.float32, torch.float32),
            (30.0, None, torch.float32),
            (0.2, None, torch.float32),
            (None, torch.float64, torch.float32),
            (5.0, torch.bfloat16, torch.bfloat16),
        ],
        [1, 10_000],
        [None, 50],
        by_day=[
            ((1.5, torch.float32, torch.float32), 10_000, 50),
            ((30.0, None, torch.float32), 1, None),
            ((0.2, None, torch.float32), 1, 50),
            ((None, torch.float64, torch.float32), 10_000, None),
            ((5.0, torch.bfloat16, torch.bfloat16), 10_000, 50),
        ],
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # at the cap: 1 - 2 / inf
def test_soft_cap_and_sinks(
    scoring: tuple[float | None, torch.dtype | None, torch.dtype],
    programs: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``scoring``: the cap, the dtype of the sinks, and that of everything else."""
    soft_cap, sink_dtype, dtype = scoring
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 128)
    monkeypatch.setattr(triton_attention, "PROGRAMS_WANTED", programs)
    requests = _requests([150, 20], 6, 2, 32, dtype)
    sinks = None if sink_dtype is None else some_sinks(6).to(sink_dtype)
    run = AttentionRun(
        triton_attention_kernels(), requests, 2, window, soft_cap=soft_cap, sinks=sinks
    )
    for r, part in enumerate(run.run([[(0, 131), (1, 20)], [(0, 19)]])):
        _assert_right(part, requests[r], window, soft_cap, sinks)


LENGTHS = (150, 37, 90)
SCHEDULES: dict[str, Schedule] = {
    "chunks of 30": in_chunks(LENGTHS[0], 30),
    "chunks of 67": in_chunks(LENGTHS[0], 67),
    "in company": in_company(LENGTHS, 3),
    "one by one at the end": [[(0, 147)], *([(0, 1)] for _ in range(3))],
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "pages", "dtype", "soft_cap", "chunk"),
    [
        (2, 1, 32, None, 3, torch.float32, None, None),
        (3, 1, 24, 17, 1, torch.float16, None, None),
        (8, 2, 64, None, 5, torch.bfloat16, 1.5, None),
        (2, 1, 32, None, 1, torch.float32, None, 50),
        at_night(8, 2, 64, None, 5, torch.bfloat16, None, None),
        at_night(2, 2, 80, 100, 2, torch.bfloat16, None, None),
        at_night(2, 1, 32, 100, 3, torch.float32, 0.2, None),
        at_night(8, 2, 64, None, 2, torch.bfloat16, 1.5, 33),
    ],
)
def test_same_bits_in_chunks_in_company_and_however_the_keys_are_spread(
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int | None,
    pages: int,
    dtype: torch.dtype,
    soft_cap: float | None,
    chunk: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a soft cap and sinks, and without both."""
    sinks = None if soft_cap is None else some_sinks(heads)
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 128)
    requests = _requests(list(LENGTHS), heads, kv_heads, head_size, dtype)

    def run(schedule: Schedule, programs: int) -> torch.Tensor:
        monkeypatch.setattr(triton_attention, "PROGRAMS_WANTED", programs)
        seed = random.Random(programs).randrange(100)
        run = AttentionRun(
            triton_attention_kernels(), requests, pages, window, seed, soft_cap, sinks, chunk
        )
        return run.run(schedule)[0]

    whole = run(in_chunks(LENGTHS[0], LENGTHS[0]), 1)
    _assert_right(whole, requests[0], window, soft_cap, sinks, chunk)
    for name, schedule in SCHEDULES.items():
        for programs in (1, 10_000) if len(schedule) < 5 else (10_000,):
            assert torch.equal(run(schedule, programs), whole), f"{name}, {programs} programs"


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [(256, torch.bfloat16), at_night(64, torch.float16), at_night(128, torch.bfloat16)],
)
def test_same_bits_in_tiles_of_many_and_of_few_rows(
    head_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper; elsewhere all tiles have the same number of rows."""
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 384)
    shapes = [triton_attention._tile_shape(dtype, head_size, rows) for rows in (64, 65)]
    assert [shape.rows for shape in shapes] == [64, 128] or cards.generation() != 9
    requests = _requests([450], 2, 1, head_size, dtype)
    whole, in_parts = (
        AttentionRun(triton_attention_kernels(), requests, 3, None).run(in_chunks(450, size))[0]
        for size in (450, 32)
    )
    _assert_right(whole, requests[0], None)
    assert torch.equal(whole, in_parts)


def test_requests_without_tokens_and_steps_without_any() -> None:
    requests = _requests([20, 9, 30], 2, 1, 16, torch.float32)
    run = AttentionRun(triton_attention_kernels(), requests, 1, None)
    run.write([(0, 20), (2, 30)])
    query = torch.cat((requests[0][0], requests[2][0]))
    rows = [table + [0] * (2 - len(table)) for table in run.tables]
    layout = make_layout([0, 20, 0, 30, 0], [7, 0, 3, 0, 2])
    table = torch.tensor([rows[1], rows[0], rows[1], rows[2], rows[1]], dtype=torch.int32)
    scale = 2.0 * 16**-0.5
    attend = run.kernels.paged_attention
    out = attend(query, run.pool.kv_cache, table, layout, scale)
    _assert_right(out[:20], requests[0], None)
    _assert_right(out[20:], requests[2], None)
    assert attend(query[:0], run.pool.kv_cache, table[:0], layout, scale).shape == (0, 2, 16)


@pytest.mark.parametrize("too_large", [False, True])
def test_partial_results_stay_within_their_memory(
    too_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 128)
    monkeypatch.setattr(triton_attention, "MAX_PARTIAL_BYTES", 0 if too_large else 2**20)
    combined = []
    kernel = triton_attention._combine_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            combined.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_attention, "_combine_kernel", Counted())
    requests = _requests([300], 2, 1, 32, torch.float32)
    run = AttentionRun(triton_attention_kernels(), requests, 3, None)
    run.write([(0, 299)])
    run.computed[0] = 299
    run.write([(0, 1)])
    _assert_right(run.attend([(0, 1)]), requests[0], None)
    assert bool(combined) is not too_large


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_tiles_follow_the_batch_on_hopper_alone(
    capability: tuple[int, int], head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the warps of another tile would sum in another order."""
    monkeypatch.setattr(cards, "_capability", lambda: capability)
    for dtype in (torch.bfloat16, torch.float32):
        shapes = {triton_attention._tile_shape(dtype, head_size, rows) for rows in (1, 64, 9000)}
        assert len(shapes) == 1
