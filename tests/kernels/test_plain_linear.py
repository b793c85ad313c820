"""What products keep in memory, beyond their operands."""

from __future__ import annotations

import subprocess
import sys

PRODUCTS_OF_MANY_SIZES = """
import psutil, torch
from vllm.kernels.plain_linear import pack_weight, row_invariant_linear
torch.set_num_threads(1)
weights = [torch.randn(64 * m, 64 * n, dtype=torch.bfloat16) for m in (1, 2, 3) for n in (1, 2)]
packed = [pack_weight(weight) for weight in weights]
inputs = {64 * n: torch.randn(2048, 64 * n, dtype=torch.bfloat16) for n in (1, 2)}
def run(num_rows):
    for weight, pack in zip(weights, packed):
        x = inputs[weight.shape[1]][:num_rows]
        row_invariant_linear(x, weight if pack is None else pack, None)
run(2048)
before = psutil.Process().memory_info().rss
for num_rows in range(1, 2048, 13):
    run(num_rows)
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def test_kernels_for_ever_new_sizes_are_not_kept_for_ever() -> None:
    """Some 70 sizes of 6 products, half a MiB each: kept all, they would take 200 MiB."""
    command = [sys.executable, "-c", PRODUCTS_OF_MANY_SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120
