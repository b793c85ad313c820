"""Values that a compiler loses, and registers that it overwrites, are seen in its listings."""

from __future__ import annotations

import pytest
from compiled_faults import lost_values, overwritten_operands

LOOPS = """
%s = scf.for %i = %a to %b step %c iter_args(%x = %p, %t = %z) -> (tensor<8x16xf32>, i64)  : i32 {
  %u = scf.for %j = %t to %e step %d iter_args(%y = %x) -> (tensor<8x16xf32>)  : i64 { loc(#l)
"""
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, {%r7,%r8}, %rd1, 1, 1, 1;"
SHARED = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd2, %rd1, 1, 1, 1;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def test_a_scalar_that_a_loop_no_longer_carries() -> None:
    laid_out = LOOPS.replace("tensor<8x16xf32>", "tensor<8x16xf32, #blocked>")
    assert lost_values(LOOPS, laid_out) == []
    without = laid_out.replace(", %t = %z", "").replace(", i64)  : i32", ")  : i32")
    assert lost_values(LOOPS, without) == ["i64"]
    more = laid_out.replace(", i64)", ", i64, i32, !ttg.async.token)")  # what a pipeline adds
    assert lost_values(LOOPS, more) == []
    assert lost_values(LOOPS, laid_out.splitlines()[1]) == ["2 loops became 1"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([PRODUCT, WAIT, "mov.b32 %r7, %r9;"], []),
        ([PRODUCT, "mov.b32 %r7, %r9;", WAIT], ["%r7"]),
        ([PRODUCT, "mov.b64 {%r9, %r8}, %rd9;", WAIT], ["%r8"]),
        ([PRODUCT, "add.s32 %r9, %r7, %r8;", "st.global.b32 [%rd3], %r7;", WAIT], []),
        ([SHARED, "mov.b32 %r7, %r9;", WAIT], []),
        # In the next turn of a loop, before the wait and after it.
        (["$L__BB0_1:", "cvt.rn.bf16x2.f32 %r7, %f1, %f2;", WAIT, PRODUCT, "@%p1 bra $L__BB0_1;"],
         ["%r7"]),
        (["$L__BB0_1:", WAIT, "cvt.rn.bf16x2.f32 %r7, %f1, %f2;", PRODUCT, "@%p1 bra $L__BB0_1;"],
         []),
        ([PRODUCT, "bra.uni $L__BB0_2;", "$L__BB0_1:", "mov.b32 %r7, %r9;", "$L__BB0_2:", WAIT],
         []),
    ],
)  # fmt: skip
def test_a_register_that_is_written_while_a_product_reads_it(
    lines: list[str], found: list[str]
) -> None:
    assert overwritten_operands("\n".join(lines)) == found
