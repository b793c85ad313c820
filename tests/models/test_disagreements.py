"""A checkpoint whose config and weights disagree: one error that names the tensor, or the entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from vllm.model_executor.model_loader import get_model

Weights = dict[str, torch.Tensor]
FAMILIES = {
    "llama": "model.layers.1.mlp.down_proj.weight",
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    "qwen3_5": "model.layers.2.linear_attn.in_proj_qkv.weight",
    "gemma3": "model.layers.1.self_attn.q_norm.weight",
    "falcon": "transformer.h.1.self_attention.query_key_value.weight",
}
"""A tensor of each."""
CONVERTED = {"mixtral": "model.layers.1.mlp.experts.gate_up_proj"}
"""Tensor that transformers makes of it, if that is another one."""
IMPLS = ["vllm", "transformers"]
FEED_FORWARD = {"gpt2": "n_inner", "falcon": "ffn_hidden_size"}
VOCABULARY = {
    "gpt2": "transformer.wte.weight",
    "gemma3": "model.embed_tokens.weight",
    "falcon": "transformer.word_embeddings.weight",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each family, which tests copy."""
    folder = tmp_path_factory.mktemp("whole")
    return lambda family: (
        folder / family
        if (folder / family).exists()
        else make_checkpoint(folder / family, family, tokenizer=False)
    )


def complaint(
    whole: Path,
    folder: Path,
    model_impl: str,
    change: Callable[[Weights], object] | None = None,
    **entries: Any,
) -> str:
    """Why the changed checkpoint is refused."""
    weights = load_file(whole / "model.safetensors")
    if change is not None:
        change(weights)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    options: Any = {"model_impl": model_impl, "dtype": "float32"}
    with pytest.raises(ValueError) as error:
        get_model(vllm_config=make_config(folder, **options))
    return str(error.value)


@pytest.mark.parametrize("model_impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_are_missing_left_over_or_of_another_shape(
    family: str, model_impl: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, name = made(family), FAMILIES[family]
    named = CONVERTED.get(family, name) if model_impl == "transformers" else name
    assert named in complaint(whole, tmp_path, model_impl, lambda w: w.pop(name))
    extra = {"model.layers.0.extra": torch.ones(3)}
    assert "model.layers.0.extra" in complaint(
        whole, tmp_path, model_impl, lambda w: w.update(extra)
    )
    for shape in ((3, 5), (7,)):
        wrong = {name: torch.ones(shape)}
        reason = complaint(whole, tmp_path, model_impl, lambda w, new=wrong: w.update(new))
        assert named in reason
        assert family in CONVERTED or str(shape) in reason or str(shape[::-1]) in reason


@pytest.mark.parametrize("model_impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_another_model(
    family: str, model_impl: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = made(family)
    size = FEED_FORWARD.get(family, "intermediate_size")
    reason = complaint(whole, tmp_path, model_impl, **{size: 200})
    assert "mlp" in reason or "experts" in reason
    assert "200" in reason or "400" in reason
    reason = complaint(whole, tmp_path, model_impl, vocab_size=400)
    assert VOCABULARY.get(family, "lm_head.weight") in reason and "400" in reason
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    reason = complaint(whole, tmp_path, model_impl, **{layers: 6})
    assert any(part in reason for part in ("layers.4.", "h.4.", "layer_types"))


@pytest.mark.parametrize("model_impl", IMPLS)
@pytest.mark.parametrize(
    ("family", "entry"),
    [
        ("llama", "hidden_act"),
        ("mixtral", "hidden_act"),
        ("qwen3_5", "hidden_act"),
        ("gemma3", "hidden_activation"),
        ("gpt2", "activation_function"),
    ],
)
def test_an_unknown_activation(
    family: str, entry: str, model_impl: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    reason = complaint(made(family), tmp_path, model_impl, **{entry: "tanhexp"})
    assert "='tanhexp' is not" in reason
    assert model_impl == "vllm" or f"config.json: {entry}='tanhexp'" in reason


@pytest.mark.parametrize("model_impl", IMPLS)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5", "falcon"])
def test_an_unknown_rope_type(
    family: str, model_impl: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "wavy", "rope_theta": 10000.0}
    reason = complaint(made(family), tmp_path, model_impl, rope_parameters=rope)
    assert "rope_type='wavy' is not" in reason
    incomplete = {"rope_type": "yarn", "rope_theta": 10000.0}
    reason = complaint(made(family), tmp_path, model_impl, rope_parameters=incomplete)
    assert "factor" in reason and "yarn" in reason
