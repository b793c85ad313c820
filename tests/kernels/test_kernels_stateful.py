"""Attention and recurrent layers over a poisoned pool, against naive float64 forms."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from kernel_calls import ISAS_OF_PAIRS, Kernels
from kernel_pools import assert_only_changed, make_layout, make_plan, strided
from kernel_reference import HALF_ULP, assert_near
from kernel_steps import AttentionRun, RecurrentLayer, some_sinks

MIXED_STEP = [(1, 0), (1, 37), (20, 0), (33, 70), (1, 129), (5, 11)]
"""(tokens, context) of the requests of one step: decodes and prefills, with and without context."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "pages", "soft_cap", "sinks"),
    [
        (1, 1, 8, None, 1, None, None),
        (3, 1, 24, 5, 2, None, None),
        (4, 4, 64, 17, 3, None, None),
        (8, 2, 80, 100, 5, None, None),
        (8, 1, 256, None, 9, None, None),
        (6, 3, 64, 1, 4, None, None),
        (8, 1, 64, 100, 1, None, None),
        (3, 1, 24, None, 2, 0.2, None),  # most scores at the cap
        (4, 2, 80, 33, 3, 30.0, None),
        (2, 2, 40, None, 1, 1e5, None),  # as if there were none
        (6, 3, 64, 1, 4, None, torch.float64),
        (8, 1, 256, None, 9, None, torch.bfloat16),
        (3, 1, 24, 50, 2, 1.5, torch.float32),
        (8, 2, 64, None, 5, 5.0, torch.float16),
    ],
)
def test_paged_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int | None,
    pages: int,
    soft_cap: float | None,
    sinks: torch.dtype | None,
) -> None:
    sink_scores = None if sinks is None else some_sinks(heads).to(sinks)
    requests = []
    for tokens, context in MIXED_STEP:
        query = strided(torch.randn(tokens + context, heads, head_size).to(dtype), padding=24)
        kv = torch.randn(2, tokens + context, kv_heads, head_size).to(dtype)
        requests.append((query, kv[0], kv[1]))
    run = AttentionRun(kernels, requests, pages, window, soft_cap=soft_cap, sinks=sink_scores)
    run.run([[(r, context) for r, (_, context) in enumerate(MIXED_STEP) if context]])
    step = [(r, tokens) for r, (tokens, _) in enumerate(MIXED_STEP)]
    run.write(step)
    before = run.pool.pool.clone()
    out = run.attend(step)
    assert torch.equal(run.pool.pool, before)
    assert out.is_contiguous()
    scoring = (2.0 * head_size**-0.5, window, soft_cap)
    wide_sinks = None if sink_scores is None else sink_scores.double()
    expected, magnitudes = [], []
    for (query, key, value), (_, context) in zip(requests, MIXED_STEP, strict=True):
        for found, v in ((expected, value.double()), (magnitudes, value.double().abs())):
            asked = query[context:].double()
            found.append(reference.attention(asked, key.double(), v, *scoring, wide_sinks))
    allowance = None
    pairs = isinstance(kernels, Kernels) and kernels.isa in ISAS_OF_PAIRS
    if pairs and dtype is torch.bfloat16:
        # The products of bfloat16 pairs take the softmax weights rounded to bfloat16.
        allowance = HALF_ULP[dtype] * (torch.cat(magnitudes) + torch.cat(expected).abs())
    assert_near(out, torch.cat(expected), dtype, allowance=allowance)


@pytest.mark.parametrize(("chunk", "pages"), [(1, 1), (17, 2), (64, 3), (1000, 1)])
def test_attention_inside_of_chunks(
    kernels: Kernels, dtype: torch.dtype, chunk: int, pages: int
) -> None:
    """Blocks of earlier chunks are freed and poisoned."""
    requests = []
    for tokens, context in MIXED_STEP:
        query = torch.randn(tokens + context, 6, 40).to(dtype)
        kv = torch.randn(2, tokens + context, 2, 40).to(dtype)
        requests.append((query, kv[0], kv[1]))
    run = AttentionRun(kernels, requests, pages, None, chunk=chunk)
    run.run([[(r, context) for r, (_, context) in enumerate(MIXED_STEP) if context]])
    step = [(r, tokens) for r, (tokens, _) in enumerate(MIXED_STEP)]
    run.write(step)
    out = run.attend(step).split([tokens for _, tokens in step])
    for part, (query, key, value), (_, context) in zip(out, requests, MIXED_STEP, strict=True):
        asked = query[context:].double()
        scale = 2.0 * 40**-0.5
        given = (asked, key.double(), value.double(), scale, None)
        expected = reference.attention(*given, chunk=chunk)
        tolerance = 1e-5 if dtype is torch.float32 else 2**-6
        torch.testing.assert_close(part.double(), expected, rtol=tolerance, atol=tolerance)


LAYERS = [
    (1, 1, 8, 8, 4),
    (2, 6, 24, 40, 4),
    (3, 3, 64, 64, 2),
    (1, 4, 80, 24, 3),
    (1, 2, 33, 192, 4),
]
LAYER_NAMES = ("k_heads", "v_heads", "dk", "dv", "width")
SNAPSHOTS = [[], [(1, 9)], [(3, 10), (16, 11), (20, 12)], [], [], [(5, 13)]]
"""(tokens, block) by request of MIXED_STEP; the states themselves are in blocks 1 .. 6."""


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(LAYER_NAMES, LAYERS)
def test_causal_conv1d(
    kernels: Kernels,
    dtype: torch.dtype,
    k_heads: int,
    v_heads: int,
    dk: int,
    dv: int,
    width: int,
    with_bias: bool,
) -> None:
    layer = RecurrentLayer(dtype, k_heads, v_heads, dk, dv, width)
    weight, bias = layer.weights["conv"], layer.weights["bias"] if with_bias else None
    query_lens = [tokens for tokens, _ in MIXED_STEP]
    has_state = [context > 0 for _, context in MIXED_STEP]
    pool = layer.new_pool(14)
    cache, _ = layer.views(pool)
    for r, has in enumerate(has_state):
        if has:
            cache[r + 1] = torch.randn(width - 1, layer.channels).to(dtype)
    before = pool.clone()
    before_cache, _ = layer.views(before)
    x = strided(layer.inputs(sum(query_lens)).x)
    out = kernels.causal_conv1d(
        x,
        weight,
        bias,
        cache,
        make_layout(query_lens, [context for _, context in MIXED_STEP]),
        make_plan([1, 2, 3, 4, 5, 6], has_state, SNAPSHOTS),
    )
    assert out.dtype is dtype and out.stride(1) == 1
    expected, written = [], []
    for r, part in enumerate(torch.split(x, query_lens)):
        past = before_cache[r + 1] if has_state[r] else torch.zeros(width - 1, layer.channels)
        inputs = torch.cat((past.to(dtype), part))
        for tokens, block in (*SNAPSHOTS[r], (len(part), r + 1)):
            assert torch.equal(cache[block], inputs[tokens : tokens + width - 1])
            written.append((before_cache[block], cache[block]))
        expected.append(
            reference.convolve(
                part.double(),
                past.double(),
                weight.double(),
                None if bias is None else bias.double(),
            )
        )
    assert_near(out, torch.cat(expected), dtype)
    assert_only_changed(before, pool, written)


@pytest.mark.parametrize(LAYER_NAMES, LAYERS)
def test_gated_delta_rule(
    kernels: Kernels, dtype: torch.dtype, k_heads: int, v_heads: int, dk: int, dv: int, width: int
) -> None:
    layer = RecurrentLayer(dtype, k_heads, v_heads, dk, dv, width)
    query_lens = [tokens for tokens, _ in MIXED_STEP]
    has_state = [context > 0 for _, context in MIXED_STEP]
    pool = layer.new_pool(14)
    _, cache = layer.views(pool)
    for r, (_, context) in enumerate(MIXED_STEP):
        if context:
            layer.fill_state(pool, kernels, r + 1, context)
    before = pool.clone()
    inputs = layer.inputs(sum(query_lens))
    a, b = strided(inputs.a), strided(inputs.b)
    a[0, 0], a[1, 0], b[2, 0], b[3, 0] = 60.0, -60.0, 60.0, -60.0
    a_log, dt_bias = layer.weights["a_log"], layer.weights["dt_bias"]
    out = kernels.gated_delta_rule(
        inputs.x,
        a,
        b,
        a_log,
        dt_bias,
        cache,
        k_heads,
        make_layout(query_lens, [context for _, context in MIXED_STEP]),
        make_plan([1, 2, 3, 4, 5, 6], has_state, SNAPSHOTS),
        layer.pending(pool, kernels),
    )
    assert out.is_contiguous()
    in_pairs = isinstance(kernels, Kernels) and kernels.isa in ISAS_OF_PAIRS
    rounds = in_pairs and dtype is torch.bfloat16  # operands of the long products
    expected, start = [], 0
    for r, (tokens, context) in enumerate(MIXED_STEP):
        own = slice(start, start + tokens)
        state = torch.zeros(v_heads, dk, dv).double()
        if context:
            state = layer.whole_state(before, kernels, r + 1, context)
        outputs, states = reference.delta_rule(
            inputs.x[own].double(),
            a[own].double(),
            b[own].double(),
            a_log.double(),
            dt_bias.double(),
            state,
            k_heads,
        )
        for kept, block in (*SNAPSHOTS[r], (tokens, r + 1)):
            whole = layer.whole_state(pool, kernels, block, context + kept)
            _assert_state(whole, states[kept - 1], rounds)
            own_parts = [layer.views(pool)[1], *layer.pending(pool, kernels)]
            old_parts = [layer.views(before)[1], *layer.pending(before, kernels)]
            for old, new in zip(old_parts, own_parts, strict=True):
                old[block] = new[block]
        expected.append(outputs)
        start += tokens
    if rounds:
        _assert_rms(out, torch.cat(expected), 2**-8)
    else:
        assert_near(out, torch.cat(expected), dtype)
    assert torch.equal(before, pool)


@pytest.mark.parametrize("threads", [1, 2])
def test_keys_of_no_weight_are_left_out(native: Kernels, threads: int) -> None:
    """Weights below 1e-38 are zeros: subnormal numbers take many CPUs a hundred times as long."""
    torch.set_num_threads(threads)
    query, key, value = torch.zeros(3, 600, 1, 64)
    query[..., 0], key[::2, :, 0], value[1::2] = 20.0, 19.0, 1e30  # e ** -95 of the greatest one
    run = AttentionRun(native, [(query, key, value)], 1, None)
    rows = run.run([[(0, 599)], [(0, 1)]])[0]
    assert (rows == 0).all()


@pytest.mark.parametrize(LAYER_NAMES, LAYERS)
def test_a_state_that_nobody_reads_need_not_be_written(
    kernels: Kernels, dtype: torch.dtype, k_heads: int, v_heads: int, dk: int, dv: int, width: int
) -> None:
    """Same outputs and snapshots, and what is kept of the other requests."""
    layer = RecurrentLayer(dtype, k_heads, v_heads, dk, dv, width)
    inputs = layer.inputs(70)
    snapshots, seen = [[(16, 4), (19, 5)], [], []], []
    for is_final in (None, [True, False, True]):
        pool = layer.new_pool(6)
        conv, state = layer.views(pool)
        plan = make_plan([1, 2, 3], [False] * 3, snapshots, is_final)
        layout = make_layout([32, 22, 16], [0, 0, 0])
        weights = layer.weights
        qkv = kernels.causal_conv1d(inputs.x, weights["conv"], None, conv, layout, plan)
        gates = (inputs.a, inputs.b, weights["a_log"], weights["dt_bias"])
        pending = layer.pending(pool, kernels)
        out = kernels.gated_delta_rule(qkv, *gates, state, k_heads, layout, plan, pending)
        kept = {2: 22, 4: 16, 5: 19}
        parts = [p for b, n in kept.items() for p in layer.kept(pool, kernels, b, n)]
        seen.append([out, *(part.clone() for part in parts)])
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize(("dk", "dv"), [(32, 64), (33, 24), (1, 70), (2, 130)])
def test_states_keep_every_bit(kernels: Kernels, dtype: torch.dtype, dk: int, dv: int) -> None:
    """Bits of states that are halfway between two numbers of 16 bits are kept too."""
    layer = RecurrentLayer(dtype, 1, 2, dk, dv, 4)
    shape = (2, dk, dv)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])[torch.randint(6, shape)]
    exponent, fraction = torch.randint(60, 190, shape), torch.randint(128, shape)
    bits = -torch.randint(2, shape) * 2**31 + exponent * 2**23 + fraction * 2**16 + low
    state = bits.to(torch.int32).view(torch.float32)
    pool = layer.new_pool(4)
    layer.fill_state(pool, kernels, 1, 32, state)
    inputs = layer.inputs(16)
    inputs.x[:, dk : 2 * dk] = 0  # no key: nothing is added
    a = torch.full_like(inputs.a, -60.0)  # and nothing decays
    steps = [(0, 3, [(2, 2)]), (3, 1, [(1, 3)]), (4, 12, [])]  # first token, tokens, snapshots
    for first, tokens, snapshots in steps:
        own = slice(first, first + tokens)
        kernels.gated_delta_rule(
            inputs.x[own],
            a[own],
            inputs.b[own],
            layer.weights["a_log"],
            layer.weights["dt_bias"],
            layer.views(pool)[1],
            1,
            make_layout([tokens], [32 + first]),
            make_plan([1], [True], [snapshots]),
            layer.pending(pool, kernels),
        )
    for block, num_tokens in ((1, 48), (2, 34), (3, 36)):
        assert torch.equal(layer.whole_state(pool, kernels, block, num_tokens), state.double())


@pytest.mark.parametrize("tokens", [16, 1])
def test_states_that_decay_become_zeros(native: Kernels, dtype: torch.dtype, tokens: int) -> None:
    """They never hold subnormal numbers, which take many CPUs a hundred times as long."""
    layer = RecurrentLayer(dtype, 1, 2, 33, 24, 4)
    pool = layer.new_pool(2)
    layer.fill_state(pool, native, 1, 32, torch.full((2, 33, 24), 2e-38))
    inputs = layer.inputs(16)
    inputs.x[:, 33:66] = 0  # no key: nothing is added
    rates = torch.full_like(inputs.a, -1.5), torch.zeros_like(inputs.b)  # 0.04 is left of it
    for first in range(0, 16, tokens):
        own = slice(first, first + tokens)
        native.gated_delta_rule(
            inputs.x[own],
            *(rate[own] for rate in rates),
            torch.zeros_like(layer.weights["a_log"]),
            torch.zeros_like(layer.weights["dt_bias"]),
            layer.views(pool)[1],
            1,
            make_layout([tokens], [32 + first]),
            make_plan([1], [True]),
            layer.pending(pool, native),
        )
    assert (layer.whole_state(pool, native, 1, 48) == 0).all()


def _assert_state(state: torch.Tensor, expected: torch.Tensor, rounds: bool) -> None:
    if rounds:
        _assert_rms(state, expected, 2**-8)
    else:
        assert_near(state.float(), expected, torch.float32)


def _assert_rms(values: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Errors against the root mean square of the values: their own, and the largest."""
    error = (values.double() - expected).abs()
    scale = expected.square().mean().sqrt()
    assert error.square().mean().sqrt() <= limit * scale
    assert error.max() <= 16 * limit * scale
