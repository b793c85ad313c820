"""Rows in 8 bits: what is lost, and that it is never more than promised."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.rows.fields.fp8 import FP8, dequantize_rows, quantization_errors, quantize_rows


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(64, 700),
    st.floats(-30, 30),
    st.floats(0, 3),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_of_every_row(
    rows: int,
    layers: int,
    hidden: int,
    log_scale: float,
    tail: float,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Rows of any size, with outliers (``tail``) as the residual stream has them.

    No single value is ever off by more than 1/16, so no row of whatever shape is.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, layers, hidden, generator=generator)
    values = (normal * torch.exp(tail * torch.randn(hidden, generator=generator))).to(dtype)
    exact = (values.double() * 10**log_scale).to(dtype)
    quantised, scales = quantize_rows(exact)
    assert quantised.dtype == FP8
    assert scales.dtype == torch.float32
    assert scales.shape == (rows, layers)
    back = dequantize_rows(quantised, scales).double()
    length = exact.double().norm(dim=-1)
    error = (back - exact.double()).norm(dim=-1) / length
    assert float(error.max()) <= 0.04
    cosine = (back * exact.double()).sum(-1) / (length * back.norm(dim=-1))
    assert float(cosine.min()) >= 0.999
    measured = quantization_errors(exact, quantised, scales)
    assert torch.allclose(measured.double(), error, rtol=1e-3, atol=1e-6)
    normal_range = exact.double().abs() > 2**-6 * scales.double()[..., None]
    assert ((back / exact.double() - 1).abs()[normal_range] <= 1 / 16 + 1e-6).all()


def test_zeros_and_what_is_not_finite() -> None:
    rows = torch.ones(4, 2, 5)
    rows[0] = 0
    rows[1, 0, 3] = torch.inf
    rows[2, 1, 0] = torch.nan
    quantised, scales = quantize_rows(rows)
    assert scales[0].tolist() == [1, 1]
    assert torch.equal(dequantize_rows(quantised[:1], scales[:1]), rows[:1])
    assert torch.isfinite(scales).tolist() == [
        [True, True], [False, True], [True, False], [True, True],
    ]  # fmt: skip
    assert torch.equal(dequantize_rows(quantised[3:], scales[3:]), rows[3:])
    assert quantization_errors(rows[:1], quantised[:1], scales[:1]).tolist() == [[0, 0]]


def test_every_value_of_e4m3_is_decoded() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    exact = values.float()
    finite = torch.isfinite(exact)
    found = dequantize_rows(values[finite].view(1, 1, -1), torch.ones(1, 1))
    assert torch.equal(found.flatten(), exact[finite])
    strided = values[finite].view(1, 2, -1).transpose(1, 2)[:, ::3]
    expected = strided.float() * 0.3
    assert torch.equal(
        dequantize_rows(strided, torch.tensor(0.3).expand(strided.shape[:2])), expected
    )


def test_extremes_of_float32() -> None:
    largest = torch.finfo(torch.float32).max
    for value in (largest, -largest, 1e-38, 1e-44):
        quantised, scales = quantize_rows(torch.full((1, 1, 3), value))
        assert torch.isfinite(scales).all()
        back = dequantize_rows(quantised, scales)
        assert torch.isfinite(back).all()
        if abs(value) > 1e-36:
            assert torch.allclose(back, torch.full_like(back, value), rtol=0.04)
