"""Rotations of transformers' modules that run by the shared operation: those that are the same."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.test_shared_mlps import made
from vllm.model_executor.model_loader.loader import _default_dtype
from vllm.model_executor.transformers_modules import rotations
from vllm.model_executor.transformers_modules.rotations import replace_rotations


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4", "gpt_neox", "cohere", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_of_models(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(family, dtype)
    ids = torch.arange(3, 20)[None]
    expected = model(ids, use_cache=False).logits
    with _default_dtype(dtype):  # as while a model loads
        assert replace_rotations(model) == model.config.num_hidden_layers
    rotated: list[torch.Tensor] = []
    operation = rotations.rotary_embedding

    def counted(positions: torch.Tensor, *rest: Any) -> None:
        rotated.append(positions)
        operation(positions, *rest)

    monkeypatch.setattr(rotations, "rotary_embedding", counted)
    found = model(ids, use_cache=False).logits
    assert len(rotated) == model.config.num_hidden_layers
    scale = float(expected.float().square().mean().sqrt())
    most = 1e-4 if dtype is torch.float32 else 0.2
    assert float((found.float() - expected.float()).abs().max()) < most * scale


def rotate_alone(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    turned = torch.cat((-q[..., 6:12], q[..., :6]), -1)
    return q * cos + turned * sin, k


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    half = q.shape[-1] // 2

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class RotatesQueries(nn.Module):
    def forward(self, *given: torch.Tensor) -> Any:
        return rotate_alone(*given)


class Rotates(nn.Module):
    def forward(self, *given: torch.Tensor) -> Any:
        return rotate(*given)


def test_other_rotations_stay() -> None:
    model = nn.Sequential(RotatesQueries(), Rotates())
    assert replace_rotations(model) == 1
    assert "forward" not in vars(model[0]) and isinstance(model[1].forward, MethodType)


def test_angles_of_another_form_go_to_the_function() -> None:
    model = nn.Sequential(Rotates())
    assert replace_rotations(model) == 1
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2))
    before = q.clone()
    cos, sin = (torch.rand(1, 5, 8, generator=generator) for _ in range(2))
    halves = [torch.cat((x[..., :4], x[..., :4]), -1) for x in (cos, sin)]
    for angles in ((cos, sin), halves, (cos, sin)):
        for found, expected in zip(model[0](q, k, *angles), rotate(q, k, *angles), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(q, before)
