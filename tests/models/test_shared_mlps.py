"""MLPs of transformers' modules that run by the shared operations: those that compute the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from tests.models.families import FAMILIES
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.weight import finish_weights
from vllm.model_executor.transformers_modules.experts import (
    TransformersExperts,
    _run_experts,
    replace_experts,
)
from vllm.model_executor.transformers_modules.mlps import SharedMLP, replace_mlps
from vllm.model_executor.transformers_modules.parts import replace_linear_layers


def made(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A small model with random weights, large enough that activations bend."""
    torch.manual_seed(1)
    names = FAMILIES[family]
    config = getattr(transformers, names.config_class)(**{**names.config, **options})
    model = getattr(transformers, names.model_class)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 2.0 / max(parameter.shape[-1], 16) ** 0.5)
    return model.to(dtype)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2", "gpt_neox", "nemotron"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlps_of_models(family: str, dtype: torch.dtype) -> None:
    model = made(family, dtype)
    names = [name for name, _ in model.named_parameters()]
    ids = torch.arange(3, 20)[None]
    replace_linear_layers(model)
    expected = model(ids, use_cache=False).logits
    assert replace_mlps(model) == model.config.num_hidden_layers
    assert {name for name, _ in model.named_parameters()} == set(names)
    found = model(ids, use_cache=False).logits
    scale = float(expected.float().square().mean().sqrt())
    most = 1e-4 if dtype is torch.float32 else 0.2
    assert float((found.float() - expected.float()).abs().max()) < most * scale


class Gated(nn.Module):
    """A gated MLP, and what it might do besides."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.one, self.other = (nn.Linear(24, 40, bias=False) for _ in range(2))
        self.last = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.one(x), self.other(2 * x if self.way == "other input" else x)
        if self.way == "clamped":
            up = up.clamp(-500.0, 500.0)
        if self.way == "quick gelu":
            inner = gate * torch.sigmoid(1.702 * gate) * up
        elif self.way == "gelu nearly tanh":
            inner = functional.gelu(gate, approximate="tanh") * up * (1 + 1e-4)
        elif self.way == "up first":
            inner = gate * functional.silu(up)
        else:
            inner = functional.silu(gate) * up
        output: torch.Tensor = self.last(inner)
        return output * 1.5 if self.way == "scaled" else output


OTHERS = ["other input", "clamped", "quick gelu", "gelu nearly tanh", "scaled"]


@pytest.mark.parametrize("way", OTHERS)
def test_other_mlps_stay(way: str) -> None:
    model = nn.Sequential(Gated(way)).bfloat16()
    replace_linear_layers(model)
    assert replace_mlps(model) == 0 and "forward" not in vars(model[0])


@pytest.mark.parametrize("way", ["", "up first"])
def test_which_product_is_the_gate_is_found_out(way: str) -> None:
    model, x = nn.Sequential(Gated(way)), torch.randn(2, 5, 24)
    replace_linear_layers(model)
    expected = model(x)
    assert replace_mlps(model) == 1
    finish_weights(model)
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(x)[1, 3], model(x[1, 3:4])[0])


def test_hooks_on_its_products_see_what_they_did() -> None:
    model = nn.Sequential(Gated())
    replace_linear_layers(model)
    x = torch.randn(5, 24)
    assert replace_mlps(model) == 1
    expected, seen = model(x), []
    for name in ("one", "last"):
        product = model[0].get_submodule(name)
        product.register_forward_hook(lambda *given: seen.append(given[-1]))
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert len(seen) == 2
    assert torch.allclose(seen[0], functional.linear(x, model[0].one.weight), atol=1e-5)


@pytest.mark.parametrize(("family", "is_shared"), [("mixtral", True), ("gpt_oss", False)])
def test_experts(family: str, is_shared: bool) -> None:
    model = made(family)
    ids = torch.arange(3, 20)[None]
    expected = model(ids, use_cache=False).logits
    assert replace_experts(model) == model.config.num_hidden_layers
    experts = [m for m in model.modules() if isinstance(m, TransformersExperts)]
    assert all(isinstance(one._between[0], SiluAndMul) == is_shared for one in experts)
    found = model(ids, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_an_index_past_the_last_expert_is_none() -> None:
    model = made("mixtral")
    replace_experts(model)
    module = cast(Any, next(m for m in model.modules() if hasattr(m, "engine_experts")))
    count, hidden = module.engine_experts.num_experts, model.config.hidden_size
    x, weights = torch.randn(3, hidden), torch.tensor([[0.5, 2.0]] * 3)
    chosen = torch.tensor([[1, count], [count, 0], [count, count]])
    found = _run_experts(module, x, chosen, weights)
    alone = [_run_experts(module, x[i : i + 1], chosen[i : i + 1], weights[:1]) for i in range(3)]
    assert torch.equal(found, torch.cat(alone)) and float(found[:2].abs().min(1).values.max()) > 0
    assert not found[2].any()


def test_shared_mlps_take_what_they_do_not_know_to_the_module() -> None:
    model = nn.Sequential(Gated())
    replace_linear_layers(model)
    assert replace_mlps(model) == 1 and isinstance(model[0].forward, SharedMLP)
    x = torch.randn(5, 24)
    assert torch.allclose(model[0](x=x), model[0](x), atol=1e-5)
