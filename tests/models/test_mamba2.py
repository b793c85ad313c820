"""Mamba-2 in stacks of any layers, and configs that it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.test_models import prompt
from vllm.config import CacheConfig
from vllm.config.vllm import VllmConfig
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer
from vllm.model_executor.model_loader import get_model
from vllm.ops.state_space import pending_tensors

KINDS = ["linear_attention", "full_attention", "mlp", "moe"]


def random_stack(seed: int) -> dict[str, Any]:
    """A config of Nemotron-H with any layers, in any order, of any size."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 3])
    kinds = [draw.choice(KINDS) for _ in range(draw.randint(2, 7))]
    return {
        "layers_block_type": ["linear_attention", *kinds],
        "mamba_num_heads": groups * draw.randint(1, 5),
        "mamba_head_dim": draw.choice([4, 20, 32, 66]),
        "n_groups": groups,
        "ssm_state_size": draw.choice([5, 16, 31]),
        "conv_kernel": draw.choice([2, 4, 5]),
        "moe_latent_size": draw.choice([None, 40]),
        "time_step_min": draw.choice([0.001, 0.5]),
        "num_key_value_heads": draw.choice([1, 2, 3]),
    }


@pytest.mark.parametrize("seed", [*range(5), *(at_night(seed) for seed in range(5, 40))])
def test_any_stack_equals_transformers(seed: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "nemotron_h", tokenizer=False, **random_stack(seed))
    ids = prompt(70)
    expected = reference_run(folder, ids)
    rows = []
    for chunks in ([], [1, 23, 16, 2]):
        request = SingleRequest(make_config(folder, max_model_len=70), 70)
        sink = ListSink(frozenset(range(request.num_layers + 1)))
        logits = request.run_chunks(ids, chunks, sink)
        rows.append([sink.rows(i) for i in range(request.num_layers + 1)])
        for ours, theirs in zip(rows[-1], expected.streams, strict=True):
            assert relative_error(ours, theirs) <= 1e-4
        assert relative_error(logits, expected.logits) <= 1e-4
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_float32_stream_is_kept_in_a_bfloat16_model(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, tokenizer=False)
    request = SingleRequest(make_config(folder), 20)
    sink = ListSink(frozenset({0, 1, 4}))
    hidden = request.run(prompt(20), sink)
    assert [sink.rows(i).dtype for i in (0, 1, 4)] == [torch.bfloat16, *[torch.float32] * 2]
    assert hidden.dtype == torch.bfloat16
    with torch.inference_mode():
        assert request.model.compute_logits(hidden).dtype == torch.bfloat16


def test_what_a_layer_keeps_is_a_convolution_and_a_float32_state(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mamba2", dtype=torch.bfloat16, tokenizer=False)
    config = make_config(folder)
    get_model(vllm_config=config)
    layers = config.compilation_config.static_forward_context.values()
    (spec,) = {layer.get_kv_cache_spec(config) for layer in layers}  # type: ignore[attr-defined]
    assert all(isinstance(layer, Mamba2Mixer) for layer in layers)
    kept = ((3, 8 * 24 + 2 * 2 * 20), torch.bfloat16), ((8, 20, 24), torch.float32)
    pending = pending_tensors("cpu", torch.bfloat16, 8, 24, 2, 20)
    assert tuple(zip(spec.shapes, spec.dtypes, strict=True)) == (*kept, *pending)
    assert spec.num_pending == len(pending)


BAD_CONFIGS = [
    ("nemotron_h", {"n_groups": 4}, "n_groups=4 does not divide mamba_num_heads=6"),
    ("nemotron_h", {"mamba_head_dim": 0}, "mamba_head_dim=0 has to be a whole number above 0"),
    ("nemotron_h", {"conv_kernel": 9}, "conv_kernel=9 is not supported; supported: 2 to 8"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' is not supported"),
    ("nemotron_h", {"time_step_min": -1.0}, "time_step_min"),
    ("nemotron_h", {"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype='bfloat16'"),
    ("nemotron_h", {"sliding_window": 8}, "sliding_window=8 is not supported"),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups=3 does not divide mamba_n_heads=8"),
    ("granite_moe_hybrid", {"layer_types": ["conv"] * 5}, "layer_types[0]='conv'"),
    ("zamba2", {"n_mamba_heads": 7, "mamba_ngroups": 1}, "n_mamba_heads=7 does not divide"),
    ("zamba2", {"tie_word_embeddings": False}, "is missing"),
]


def write_config(folder: Path, **entries: Any) -> None:
    """Change entries of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(("family", "entries", "message"), BAD_CONFIGS)
def test_a_config_that_cannot_be_is_refused_by_the_name_of_its_entry(
    family: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    write_config(folder, **entries)
    with pytest.raises(ValueError) as caught:
        get_model(vllm_config=make_config(folder, model_impl="vllm"))
    assert message in str(caught.value)


def test_an_unknown_letter_of_a_pattern_is_refused_by_the_pattern(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "nemotron_h", tokenizer=False)
    write_config(folder, layers_block_type=None, hybrid_override_pattern="MX*-")
    with pytest.raises(ValueError, match=r"'X' is not known, in hybrid_override_pattern='MX\*-'"):
        make_config(folder)


def test_the_option_asks_for_float32_states_whatever_the_config_says(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "nemotron_h", tokenizer=False)
    write_config(folder, mamba_ssm_cache_dtype="bfloat16")
    config = VllmConfig(
        model_config=make_config(folder).model_config,
        cache_config=CacheConfig(mamba_ssm_cache_dtype="float32"),
    )
    get_model(vllm_config=config)
