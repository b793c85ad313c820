"""The grouped product of experts in Triton: values in every dtype, and bits in any company."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import triton_kernels
from triton_device import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from vllm.ops.experts import sort_by_expert

pytestmark = pytest.mark.usefixtures("card_or_interpreter")

NUM_EXPERTS = 7


def _choice(tokens: int, seed: int) -> torch.Tensor:
    """int64 [tokens, 2]: most tokens go to one expert, the last one gets none."""
    generator = torch.Generator().manual_seed(seed)
    second = torch.randint(3, NUM_EXPERTS - 1, (tokens, 1), generator=generator)
    first = torch.where(torch.arange(tokens)[:, None] % 5 == 0, 1, 2)
    return torch.cat((first, second), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("terms", "columns"), [(64, 128), (72, 40), (200, 150)])
def test_values(dtype: torch.dtype, terms: int, columns: int) -> None:
    pairs = sort_by_expert(_choice(90, 0), NUM_EXPERTS)
    x = torch.randn(90, terms).to(dtype)
    weight = (torch.randn(NUM_EXPERTS, columns, terms) / terms**0.5).to(dtype)
    bias = torch.randn(NUM_EXPERTS, columns).to(dtype)
    kernels = triton_kernels()
    found = kernels.expert_linear(x, pairs.tokens, pairs.starts, weight, bias)
    experts = torch.repeat_interleave(torch.arange(NUM_EXPERTS), pairs.starts.diff())
    product = torch.einsum("pn,pmn->pm", x[pairs.tokens].double(), weight[experts].double())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.double(), product + bias[experts].double(), rtol=unit, atol=4 * unit
    )
    sorted_x = x[pairs.tokens]
    assert torch.equal(kernels.expert_linear(sorted_x, None, pairs.starts, weight, bias), found)


def test_bits_do_not_depend_on_who_else_chose_an_expert() -> None:
    kernels = triton_kernels()
    x = torch.randn(150, 72).bfloat16()
    weight = torch.randn(NUM_EXPERTS, 40, 72).bfloat16()
    chosen = _choice(150, 1)

    def by_token(tokens: slice) -> torch.Tensor:
        pairs = sort_by_expert(chosen[tokens], NUM_EXPERTS)
        out = kernels.expert_linear(x[tokens], pairs.tokens, pairs.starts, weight)
        return out[pairs.places]

    whole = by_token(slice(0, 150))
    for part in (slice(0, 1), slice(70, 140), slice(149, 150)):
        assert torch.equal(by_token(part), whole[part])


def test_no_pairs() -> None:
    starts = torch.zeros(NUM_EXPERTS + 1, dtype=torch.int64)
    weight = torch.randn(NUM_EXPERTS, 40, 72)
    found = triton_kernels().expert_linear(torch.randn(0, 72), None, starts, weight)
    assert found.shape == (0, 40)
