"""The recurrent CUDA kernels, on a card or in the interpreter: values, bits, snapshots."""

from __future__ import annotations

from collections.abc import Callable

import kernel_reference as reference
import pytest
import torch
from kernel_pools import assert_only_changed, make_layout, make_plan, strided
from kernel_reference import assert_near
from kernel_steps import (
    RecurrentInputs,
    RecurrentLayer,
    RecurrentRun,
    Schedule,
    in_chunks,
    in_company,
)
from test_kernels_stateful import test_causal_conv1d, test_gated_delta_rule  # noqa: F401
from triton_device import HAS_TRITON

from tests.grids import at_night

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from kernel_calls import Kernels, plain_kernels, triton_kernels

from vllm.ops.cuda import cards, fla_recurrent, triton_recurrent
from vllm.ops.layout import HostStates

pytestmark = pytest.mark.usefixtures("card_or_interpreter")

Snapshots = list[list[tuple[int, int]]]
Outputs = tuple[torch.Tensor, ...]


@pytest.fixture
def kernels(card_or_interpreter: None) -> Kernels:
    return triton_kernels()


@pytest.fixture(autouse=True)
def _own_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GDN_BACKEND", "TRITON")


@pytest.fixture(params=[at_night(torch.float32), torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For the tests that the CPU kernels have too; few, as the interpreter is slow."""
    chosen: torch.dtype = request.param
    return chosen


LONG_STEP = [(1, 70), (64, 0), (200, 37), (49, 0), (0, 5), (130, 64), (83, 45)]
"""(tokens, context): without a whole chunk, whole chunks alone, with tokens before and after."""

LONG_SNAPSHOTS: Snapshots = [
    [(1, 11)],
    [(64, 12)],
    # Before the first chunk (27 tokens), at its start, in it (two), at a boundary, after the last.
    [(5, 13), (27, 14), (30, 15), (80, 16), (91, 17), (155, 18), (160, 19), (200, 20)],
    [(48, 21)],
    [],
    [(128, 22)],
    [(82, 23)],
]


def _check_step(
    layer: RecurrentLayer,
    inputs: RecurrentInputs,
    step: list[tuple[int, int]],
    snapshots: Snapshots,
    relative_error: float = 2e-5,
) -> None:
    """One call against the float64 recurrence, over a pool of NaN.

    ``relative_error`` is that of a state and of an output before it is rounded, to their RMS.
    """
    pool = layer.new_pool(24)
    _, cache = layer.views(pool)
    for r, (_, context) in enumerate(step):
        if context:
            cache[r + 1] = torch.randn(cache.shape[1:])
    before = pool.clone()
    _, before_cache = layer.views(before)
    a_log, dt_bias = layer.weights["a_log"], layer.weights["dt_bias"]
    layout = make_layout([tokens for tokens, _ in step], [context for _, context in step])
    out = triton_kernels().gated_delta_rule(
        strided(inputs.x),
        strided(inputs.a),
        strided(inputs.b),
        a_log,
        dt_bias,
        cache,
        layer.num_k_heads,
        layout,
        make_plan(range(1, len(step) + 1), [c > 0 for _, c in step], snapshots),
    )
    written, start = [], 0
    for r, (tokens, context) in enumerate(step):
        own = slice(start, start + tokens)
        start += tokens
        state = before_cache[r + 1] if context else torch.zeros_like(cache[0])
        per_token = (x[own].double() for x in inputs)
        weights = (a_log.double(), dt_bias.double(), state.double())
        expected, states = reference.delta_rule(*per_token, *weights, layer.num_k_heads)
        _assert_within(out[own], expected, layer.dtype, relative_error)
        for kept, block in (*snapshots[r], (tokens, r + 1)):
            if tokens:
                _assert_within(cache[block], states[kept - 1], torch.float32, relative_error)
                written.append((before_cache[block], cache[block]))
    assert_only_changed(before, pool, written)


def _assert_within(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, relative_error: float
) -> None:
    rms = float(expected.square().mean().sqrt()) if expected.numel() else 0.0
    assert_near(actual, expected, dtype, allowance=torch.tensor(relative_error * rms))


def test_convolution_of_several_tiles(kernels: Kernels) -> None:
    """Early snapshots need the old state, which only the first tile may replace."""
    layer = RecurrentLayer(torch.bfloat16, 1, 1, 8, 8)
    x, weights = layer.inputs(101).x, layer.weights
    pools, outputs = [], []
    for chosen in (kernels, plain_kernels()):
        pool = layer.new_pool(8)
        layer.views(pool)[0][1] = torch.arange(3)[:, None] + 1
        outputs.append(
            chosen.causal_conv1d(
                x,
                weights["conv"],
                weights["bias"],
                layer.views(pool)[0],
                make_layout([100, 1], [9, 0]),
                make_plan([1, 2], [True, False], [[(1, 3), (2, 4), (64, 5), (99, 6)], []]),
            )
        )
        pools.append(pool)
    assert torch.equal(*pools)
    assert_near(outputs[0], outputs[1].double(), torch.bfloat16, roundings=2)


@pytest.mark.parametrize(
    ("dtype", "v_heads", "dk", "dv"),
    [(torch.bfloat16, 2, 24, 24), (torch.float16, 1, 16, 72), (torch.bfloat16, 1, 64, 8)],
)
def test_chunks(dtype: torch.dtype, v_heads: int, dk: int, dv: int) -> None:
    layer = RecurrentLayer(dtype, 1, v_heads, dk, dv)
    inputs = layer.inputs(sum(tokens for tokens, _ in LONG_STEP))
    _check_step(layer, inputs, LONG_STEP, LONG_SNAPSHOTS, relative_error=1e-4)


def test_float32_walks() -> None:
    layer = RecurrentLayer(torch.float32, 1, 1, 16, 24)
    _check_step(layer, layer.inputs(200), [(200, 37)], LONG_SNAPSHOTS[2:3])


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 193])
def test_lengths(tokens: int) -> None:
    layer = RecurrentLayer(torch.bfloat16, 1, 1, 16, 16)
    step = [(tokens, 0), (tokens, 31)]
    _check_step(layer, layer.inputs(2 * tokens), step, [[], []], relative_error=1e-4)


def _extreme(name: str, inputs: RecurrentInputs) -> RecurrentInputs:
    """Inputs whose gates (and keys) are at the ends of their ranges."""
    x, a, b = inputs
    tokens = torch.arange(len(x))[:, None]
    if name == "all forgotten":
        a = torch.full_like(a, 60.0)
    elif name == "nothing forgotten":
        a = torch.full_like(a, -60.0)
    elif name == "forgotten now and then":
        a = torch.where(tokens % 11 == 5, 60.0, -6.0).to(a.dtype).expand_as(a)
    elif name == "no gate open":
        b = torch.full_like(b, -60.0)
    elif name == "equal keys":  # the same token again and again, fully kept and written
        x, a, b = x[:1].expand_as(x), torch.full_like(a, -60.0), torch.full_like(b, 60.0)
    return RecurrentInputs(x.contiguous(), a.contiguous(), b.contiguous())


@pytest.mark.parametrize(
    "name",
    [
        "all forgotten",
        "nothing forgotten",
        "forgotten now and then",
        "no gate open",
        "equal keys",
    ],
)
def test_extreme_gates(name: str) -> None:
    layer = RecurrentLayer(torch.bfloat16, 1, 1, 16, 16)
    layer.weights["a_log"].fill_(2.7)
    inputs = _extreme(name, layer.inputs(150))
    _check_step(layer, inputs, [(150, 20)], [[(108, 9)]], relative_error=2e-4)


def test_more_requests_than_are_looked_at_at_once(kernels: Kernels) -> None:
    """The kernels count 128 requests at a time."""
    layer = RecurrentLayer(torch.bfloat16, 1, 1, 16, 16)
    lengths = [1] * 129 + [66, 3]
    requests = [layer.inputs(tokens) for tokens in lengths]
    pool = layer.new_pool(len(lengths) + 1)
    together = RecurrentRun(kernels, layer, requests, pool).run([list(enumerate(lengths))])
    for r in (0, 127, 128, 129, 130):
        alone = RecurrentRun(kernels, layer, requests[r : r + 1], layer.new_pool(2))
        assert torch.equal(alone.run([[(0, lengths[r])]])[0], together[r])


LENGTHS = (150, 37, 70)

SCHEDULES: dict[str, Schedule] = {
    "chunks of 64": in_chunks(150, 64),
    "chunks of 128": in_chunks(150, 128),
    "rest by single tokens": [[(0, 128)]] + [[(0, 1)]] * 22,
    "rest in pieces": [[(0, 64)], [(0, 64)], [(0, 9)], [(0, 13)]],
    "in company": [[(2, 70), (0, 64), (1, 30)], [(1, 7), (0, 86)]],
}


def _same_bits(run: Callable[[Schedule], Outputs], schedules: dict[str, Schedule]) -> Outputs:
    expected = run(in_chunks(LENGTHS[0], LENGTHS[0]))
    for name, schedule in schedules.items():
        for wanted, tensor in zip(expected, run(schedule), strict=True):
            assert torch.equal(tensor, wanted), name
    return expected


def test_cuts_at_chunk_boundaries_give_the_same_bits(kernels: Kernels) -> None:
    layer = RecurrentLayer(torch.bfloat16, 1, 2, 16, 16)
    requests = [layer.inputs(tokens) for tokens in LENGTHS]
    snapshots = {0: {64: 7, 100: 8, 128: 9, 144: 10}}

    def run(schedule: Schedule) -> Outputs:
        pool = layer.new_pool(11)
        out = RecurrentRun(kernels, layer, requests, pool, snapshots).run(schedule)[0]
        return out, pool[1], pool[7:11]

    out, final, kept = _same_bits(run, SCHEDULES)
    for tokens, block in ((64, 7), (128, 9), (144, 10)):
        pool = layer.new_pool(11)
        pool[7:11] = kept
        resumed = RecurrentRun(kernels, layer, requests, pool, resume={0: (tokens, block)})
        assert torch.equal(resumed.run(in_chunks(150 - tokens, 64))[0], out[tokens:])
        assert torch.equal(pool[1], final)


def test_wide_programs_give_the_same_bits(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of programs that share a state follows the batch."""
    layer = RecurrentLayer(torch.bfloat16, 1, 2, 16, 136)
    requests = [layer.inputs(tokens) for tokens in LENGTHS]
    results, shapes = [], set()
    monkeypatch.setattr(cards, "generation", lambda: 9)
    for multiprocessors in (0, 1000):
        monkeypatch.setattr(triton_recurrent, "_MULTIPROCESSORS", multiprocessors)
        shapes.add(triton_recurrent._scan_shape(2, 136))
        pool = layer.new_pool(4)
        run = RecurrentRun(kernels, layer, requests, pool, {0: {64: 3}})
        results.append((run.run([[(0, 150)]])[0], pool[1], pool[3]))
    assert shapes == {(64, 4), (128, 8)}
    for narrow, wide in zip(*results, strict=True):
        assert torch.equal(narrow, wide)


def test_float32_has_the_same_bits_for_any_cuts(kernels: Kernels) -> None:
    layer = RecurrentLayer(torch.float32, 1, 1, 16, 16)
    requests = [layer.inputs(tokens) for tokens in LENGTHS]

    def run(schedule: Schedule) -> Outputs:
        pool = layer.new_pool(4)
        return RecurrentRun(kernels, layer, requests, pool).run(schedule)[0], pool[1]

    _same_bits(run, {"chunks of 41": in_chunks(150, 41), "in company": in_company(LENGTHS, 1)})


# ------------------------------------------------------------------ flash-linear-attention


def test_rounds_cut_requests_at_their_snapshots() -> None:
    query_start, seq_lens = [0, 64, 269, 270], [64, 37 + 205, 10]
    host = HostStates([4, 5, 6], [[], [(5, 7), (30, 8), (100, 9), (155, 10), (200, 11)], []])
    first, second = fla_recurrent.plan_rounds(query_start, seq_lens, host)
    assert first.starts == [0, 64 + 27]
    assert first.lengths == [64, 64]
    assert first.blocks == [4, 5]
    assert first.has_state == [False, True]
    assert first.kept_before == [(1, 8)]
    assert first.kept_after == [(1, 9)]  # position 100 lies in the chunk from 91 on
    assert (second.starts, second.lengths, second.has_state) == ([64 + 91], [64], [True])
    assert (second.kept_before, second.kept_after) == ([], [(0, 10)])


def _chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the library's function of this name does, one token after another."""
    assert output_final_state and use_qk_l2norm_in_kernel
    group = v.shape[2] // q.shape[2]
    q, k = (x.double().repeat_interleave(group, dim=2) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out, states = torch.empty(v.shape, dtype=torch.float64), initial_state.double()
    for i, start in enumerate(cu_seqlens[:-1].tolist()):
        chunks = chunk_indices[chunk_indices[:, 0] == i, 1].tolist()
        assert chunks == list(range((int(cu_seqlens[i + 1]) - start) // 64))
        for t in range(start, int(cu_seqlens[i + 1])):
            states[i] *= g[0, t].double().exp()[:, None, None]
            recalled = torch.einsum("hkv,hk->hv", states[i], k[0, t])
            update = beta[0, t].double()[:, None] * (v[0, t].double() - recalled)
            states[i] += torch.einsum("hk,hv->hkv", k[0, t], update)
            out[0, t] = torch.einsum("hkv,hk->hv", states[i], q[0, t]) * q.shape[-1] ** -0.5
    return out.to(v.dtype), states.float()


def test_chunks_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GDN_BACKEND", "FLA")
    monkeypatch.setattr(fla_recurrent, "_chunk_function", lambda: _chunk_gated_delta_rule)
    layer = RecurrentLayer(torch.bfloat16, 1, 2, 24, 40)
    inputs = layer.inputs(sum(tokens for tokens, _ in LONG_STEP))
    _check_step(layer, inputs, LONG_STEP, LONG_SNAPSHOTS)


def test_the_library_must_not_cut_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_recurrent, "_chunk_function", lambda: _chunk_gated_delta_rule)
    why_unavailable = fla_recurrent.why_unavailable.__wrapped__
    monkeypatch.setenv("FLA_INTRACARD_CP", "0")
    assert why_unavailable() is None
    monkeypatch.setenv("FLA_INTRACARD_CP", "1")
    assert "FLA_INTRACARD_CP=1 makes it wait" in why_unavailable()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_through_flash_linear_attention(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    problem = fla_recurrent.why_unavailable()
    if problem is not None:
        pytest.skip(problem)
    monkeypatch.setenv("VLLM_GDN_BACKEND", "FLA")
    layer = RecurrentLayer(dtype, 2, 4, 64, 64)
    inputs = layer.inputs(sum(tokens for tokens, _ in LONG_STEP))
    _check_step(layer, inputs, LONG_STEP, LONG_SNAPSHOTS, relative_error=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["TRITON", "FLA"])
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "FLA" and fla_recurrent.why_unavailable() is not None:
        pytest.skip("flash-linear-attention cannot be used")
    monkeypatch.setenv("VLLM_GDN_BACKEND", backend)
    layer = RecurrentLayer(torch.bfloat16, 2, 4, 64, 64)
    inputs, weights = layer.inputs(300), layer.weights
    conv, states = layer.views(layer.new_pool(4))
    layout, plan = make_layout([300], [0]), make_plan([1], [False], [[(64, 2), (100, 3)]])
    host = torch.tensor([0, 300], dtype=torch.int32, device="cpu")
    layout = type(layout)(layout.query_start, layout.seq_lens, 300, 300, host, host[1:])

    def run() -> None:
        step = type(plan)(
            plan.block_ids,
            plan.has_state,
            plan.snapshot_start,
            plan.snapshot_tokens,
            plan.snapshot_blocks,
            HostStates([1], [[(64, 2), (100, 3)]]),
        )
        qkv = triton_kernels().causal_conv1d(
            inputs.x, weights["conv"], weights["bias"], conv, layout, step
        )
        triton_kernels().gated_delta_rule(
            qkv, inputs.a, inputs.b, weights["a_log"], weights["dt_bias"], states, 2, layout, step
        )

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
