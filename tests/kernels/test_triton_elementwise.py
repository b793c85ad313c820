"""The CUDA kernels that work row by row, on a card or in the interpreter: the same tests."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import Kernels, triton_kernels
from test_kernels import (  # noqa: F401
    test_add_rms_norm,
    test_capture_rows,
    test_copy_blocks,
    test_gated_rms_norm,
    test_linear,
    test_rms_norm,
    test_rms_norm_of_tiny_and_huge_rows,
    test_rms_norm_without_weight_and_in_which_order_it_rounds,
    test_rotary_embedding,
    test_sigmoid_gate,
    test_silu_and_mul,
    test_write_kv,
)
from test_kernels_bit_identity import row_operations
from triton_device import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.usefixtures("card_or_interpreter"),
]


@pytest.fixture
def kernels(card_or_interpreter: None) -> Kernels:
    return triton_kernels()


def test_rows_do_not_depend_on_others(kernels: Kernels, dtype: torch.dtype) -> None:
    for name, operation in row_operations(kernels, dtype, 50).items():
        if name.startswith("linear"):
            continue  # cuBLAS
        whole = operation(slice(0, 50))
        for own in (slice(0, 1), slice(3, 20), slice(49, 50)):
            assert torch.equal(operation(own), whole[own]), f"{name}, rows {own}"


def test_no_tokens(kernels: Kernels) -> None:
    x, slots = torch.randn(3, 2, 8), torch.zeros(0, dtype=torch.int64)
    assert kernels.rms_norm(x[:0], None, 1e-6).shape == (0, 2, 8)
    assert kernels.sigmoid_gate(x[:0], x[:0]).shape == (0, 2, 8)
    kernels.rotary_embedding(slots, x[:0], x[:0], torch.randn(4, 8), False)
    kernels.write_kv(x[:0], x[:0], torch.randn(2, 1, 16, 2, 16), slots)
    kernels.capture_rows(torch.randn(2, 3, 1, 8), slots, 0, x[:0, 0], None)
    kernels.copy_blocks(torch.zeros(2, 64, dtype=torch.int8), slots, slots)
