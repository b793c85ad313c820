"""Mixtures of experts: neighbours, both ways in which weights lie in a file, what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from vllm.model_executor.layers import experts as expert_layers
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.fused_moe import FusedMoE, RoutingRule
from vllm.model_executor.layers.weight import finish_weights
from vllm.model_executor.model_loader import get_model
from vllm.ops.linear import prefers_panels

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 72, 40, 7, 3


class Half(torch.nn.Module):
    """The expert that all tokens share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def make_layer(dtype: torch.dtype, *, in_panels: bool, **options: Any) -> FusedMoE:
    torch.manual_seed(3)
    experts = Experts(NUM_EXPERTS, HIDDEN, WIDTH, bias=True)
    rule = RoutingRule(top_k=TOP_K, scores="sigmoid", renormalise=True, has_correction=True)
    layer = FusedMoE(
        HIDDEN, experts, rule, shared_expert=Half(), gates_shared_expert=True, **options
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.experts.to(dtype)
    if in_panels:
        finish_weights(layer)
    return layer.requires_grad_(False)


def naive(layer: FusedMoE, x: torch.Tensor) -> torch.Tensor:
    """In float64, token by token, expert by expert."""
    gate, correction = layer.router.gate.weight.double(), layer.router.correction
    assert correction is not None and layer.shared_expert_gate is not None
    experts = layer.experts
    rows = []
    for token in x.double():
        scores = torch.sigmoid(gate @ token)
        chosen = (scores + correction.double()).topk(TOP_K).indices
        shared = torch.sigmoid(layer.shared_expert_gate.weight[0].double() @ token)
        row = shared * 0.5 * token
        for e in chosen:
            inner = experts.gate_up_proj[e].double() @ token
            left, right = (inner + experts.gate_up_proj_bias[e].double()).chunk(2)
            inner = torch.nn.functional.silu(left) * right
            output = experts.down_proj[e].double() @ inner + experts.down_proj_bias[e].double()
            row = row + scores[e] / scores[chosen].sum() * output
        rows.append(row)
    return torch.stack(rows)


def test_values_are_those_of_the_formula() -> None:
    layer = make_layer(torch.float32, in_panels=False)
    x = torch.randn(19, HIDDEN)
    torch.testing.assert_close(layer(x).double(), naive(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_panels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_change_no_bit(dtype: torch.dtype, in_panels: bool) -> None:
    layer = make_layer(dtype, in_panels=in_panels)
    x = torch.randn(83, HIDDEN).to(dtype)
    together = layer(x)
    assert together.isfinite().all()
    for rows in ([0], [82], [5, 6], list(range(17)), list(range(82, 40, -1))):
        assert torch.equal(layer(x[rows]), together[rows])
    layer.tokens_at_once = 16
    assert torch.equal(layer(x), together)


@pytest.mark.skipif(not prefers_panels(torch.device("cpu")), reason="plain torch has no panels")
def test_experts_in_any_groups_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(torch.bfloat16, in_panels=True)
    x = torch.randn(61, HIDDEN).bfloat16()
    found = []
    for pairs_of_a_group in (0, 9, 40, 1000):
        monkeypatch.setattr(expert_layers, "_PAIRS_OF_A_GROUP", pairs_of_a_group)
        found.append(layer(x))
    assert all(torch.equal(found[0], other) for other in found)
    starts = [0, 0, 5, 8, 8, 60, 61]
    monkeypatch.setattr(expert_layers, "_PAIRS_OF_A_GROUP", 8)
    groups = [[pairs.expert for pairs in group] for group in expert_layers._groups(starts)]
    assert groups == [[1, 2], [4], [5]] and expert_layers._groups([0, 0]) == []


def test_experts_without_tokens_and_steps_without_tokens() -> None:
    layer = make_layer(torch.float32, in_panels=True)
    assert layer(torch.zeros(0, HIDDEN)).shape == (0, HIDDEN)
    assert layer.router.correction is not None
    layer.router.correction.copy_(torch.tensor([9.0, 8.0, 7.0, 0.0, 0.0, 0.0, 0.0]))
    _, chosen = layer.router(torch.randn(5, HIDDEN))
    assert chosen.sort(dim=1).values.tolist() == [[0, 1, 2]] * 5
    layer.experts.gate_up_proj[3:] = float("nan")
    assert layer(torch.randn(5, HIDDEN)).isfinite().all()


Weights = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Weights], None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def load(folder: Path) -> Any:
    return get_model(vllm_config=make_config(folder))


PREFIX = "model.layers.0.mlp.experts."


def fuse(weights: Weights) -> None:
    """One tensor for all experts of layer 0."""

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([weights.pop(f"{PREFIX}{e}.{name}.weight") for e in range(6)])

    weights[f"{PREFIX}gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), 1)
    weights[f"{PREFIX}down_proj"] = stacked("down_proj")


def test_fused_and_single_experts_load_alike(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    single = load(folder)
    edit(folder, fuse)
    fused = load(folder)
    for (name, ours), theirs in zip(single.named_parameters(), fused.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def drop_one(weights: Weights) -> None:
    del weights[f"{PREFIX}4.up_proj.weight"]


def both_ways(weights: Weights) -> None:
    weights[f"{PREFIX}down_proj"] = torch.zeros(6, 72, 40)


def wrong_shape(weights: Weights) -> None:
    weights[f"{PREFIX}4.up_proj.weight"] = torch.zeros(39, 72)


def one_too_many(weights: Weights) -> None:
    weights[f"{PREFIX}6.up_proj.weight"] = torch.zeros(40, 72)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (drop_one, rf"missing 1 weight\(s\): {PREFIX}4\.up_proj\.weight"),
        (both_ways, rf"no place for: .*{PREFIX}0\.down_proj\.weight|twice|{PREFIX}down_proj"),
        (wrong_shape, rf"{PREFIX}4\.up_proj\.weight.*\(39, 72\).*\(40, 72\)"),
        (one_too_many, rf"no place for: {PREFIX}6\.up_proj\.weight"),
    ],
)
def test_what_is_wrong_with_experts_is_named(
    change: Callable[[Weights], None], error: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    edit(folder, change)
    with pytest.raises(ValueError, match=error):
        load(folder)


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, num_experts_per_tok=7)
    with pytest.raises(ValueError, match="7 experts a token, but there are 6"):
        load(folder)
