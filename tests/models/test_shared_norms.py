"""Norms of transformers' modules that ours take the place of: those that compute the same."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.models.families import FAMILIES
from vllm.model_executor.transformers_modules.parts import _Shared, replace_norms


class WeirdNorm(nn.Module):
    """As good as an RMSNorm, but for the root."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x * x).mean(-1, keepdim=True).add(self.eps)


class GatedNorm(WeirdNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        # Matrices around zero: their products do not cancel in a LayerNorm, nor end in a soft cap.
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "norms_of_a_layer"), [("llama", 2), ("gemma2", 4), ("gpt_neox", 2), ("qwen3", 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_models(family: str, norms_of_a_layer: int, dtype: torch.dtype) -> None:
    names = FAMILIES[family]
    config = getattr(transformers, names.config_class)(**names.config)
    model = randomised(getattr(transformers, names.model_class)(config)).to(dtype)
    ids = torch.arange(3, 20)[None]
    # Two modules in float32 differ by the roundings of both, so that one is asked for the truth.
    true = model.double() if dtype is torch.float32 else model
    expected = true(ids, use_cache=False).logits.float()
    model.to(dtype)
    assert replace_norms(model) == norms_of_a_layer * config.num_hidden_layers + 1
    assert sum(isinstance(module, _Shared) for module in model.modules()) > 0
    found = model(ids, use_cache=False).logits
    scale = float(expected.float().square().mean().sqrt())
    most = 1e-5 if dtype is torch.float32 else 0.1
    assert float((found.float() - expected.float()).abs().max()) < most * scale


def test_other_norms_stay() -> None:
    model = nn.Sequential(WeirdNorm(40), GatedNorm(40), nn.LayerNorm(40), nn.BatchNorm1d(40))
    kept = list(model)
    assert replace_norms(model) == 1
    assert model[0] is kept[0] and model[1] is kept[1] and model[3] is kept[3]
    stream = torch.randn(2, 3, 40)
    assert torch.allclose(model[2](stream), kept[2](stream), atol=1e-5)


def test_a_float32_stream_in_a_model_of_another_dtype() -> None:
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(40).bfloat16()
    model, stream = nn.Sequential(norm), torch.randn(5, 40)
    assert replace_norms(model) == 1
    assert torch.equal(model[0](stream), norm(stream))
